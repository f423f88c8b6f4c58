/** Rerank: the order of documents before and after, and how far each moved. */

import { cutNotice } from "./bars.js";
import { decimal, h, shorten, svg } from "./dom.js";
import { linesField, modelField, textField } from "./forms.js";
import { gives, judgesPairs } from "./models.js";
import { workbench } from "./workbench.js";

const QUERY = "Where do whimbrels spend the winter?";
const DOCUMENTS = [
  "Winter coats are on sale until the end of the month.",
  "The whimbrel is a large wader with a curved bill.",
  "A sandwich has two slices of bread.",
  "Whimbrels winter on the coasts of Africa and South America.",
  "Many birds of the north fly south in autumn.",
  "The hotel is closed in winter.",
];
const MAX_DOCUMENTS = 60;
const ROW = 46; // height of a row in pixels, as in views.css
const WIDTH = 84;

function fits(models) {
  const comparing = models.filter((model) => ["dense", "multi_vector", "sparse"].some((output) => gives(model, output)));
  return [...models.filter(judgesPairs), ...comparing.filter((model) => !judgesPairs(model)).sort((left, right) => gives(right, "multi_vector") - gives(left, "multi_vector"))];
}

function build(context) {
  const chosen = modelField(context.models);
  const before = modelField(context.models, { label: "Order before", none: "as written" });
  const query = textField("Query", { text: QUERY });
  const documents = linesField("Documents, one a line", { lines: DOCUMENTS, max: MAX_DOCUMENTS, rows: 10, noun: "document" });

  async function run(call) {
    const texts = documents.lines;
    if (!query.text.trim() || !texts.length) throw new Error("Write a query and at least one document.");
    const first = before.name ? (await rank(call, before.name, query.text, texts)).ranked : texts.map((_, index) => ({ index }));
    const { ranked, answer } = await rank(call, chosen.name, query.text, texts);
    return [cutNotice(answer, chosen.model), chart(first, ranked, texts, before.name || "As written", chosen.name)];
  }

  return workbench(context, {
    intro: "A reranker reads the query and each document together, and puts the documents in a better order.",
    fields: [h("div", { class: "row" }, chosen.node, before.node), query.node, documents.node],
    run,
    runLabel: "Rerank",
  });
}

/** Return {ranked, answer}: documents as {index, score}, the best first. */
async function rank(call, model, query, documents) {
  const answer = await call("/v1/rerank", { model, query, documents, return_documents: false, truncate_prompt_tokens: -1 });
  return { answer, ranked: answer.data.results.map(({ index, relevance_score: score }) => ({ index, score })) };
}

function chart(first, ranked, texts, beforeTitle, afterTitle) {
  const placeBefore = new Map(first.map(({ index }, place) => [index, place]));
  const lines = ranked.map(({ index }, place) => curve(placeBefore.get(index), place));
  const left = first.map(({ index, score }) => h("li", { data: { index } }, h("span", { class: "clip", title: texts[index] }, shorten(texts[index], 160)), score !== undefined && h("span", { class: "small muted number" }, decimal(score))));
  const range = Math.max(...ranked.map(({ score }) => Math.abs(score))) || 1;
  const right = ranked.map(({ index, score }, place) => {
    const up = placeBefore.get(index) - place;
    return h("li", { class: up > 0 ? "up" : up < 0 ? "down" : "", data: { index, score, moved: up }, css: { "--share": `${(100 * Math.max(0, score / range)).toFixed(2)}%` } },
      h("span", { class: "moved number" }, movement(up, placeBefore.get(index))),
      h("span", { class: "clip", title: texts[index] }, shorten(texts[index], 160)),
      h("strong", { class: "number" }, decimal(score)));
  });
  const picture = svg("svg", { class: "slopes", viewBox: `0 0 ${WIDTH} ${ROW * ranked.length}`, width: WIDTH, height: ROW * ranked.length, "aria-hidden": "true" }, lines);
  const light = (index) => {
    for (const node of [...left, ...right]) node.classList.toggle("lit", node.dataset.index === String(index));
    ranked.forEach((each, place) => lines[place].classList.toggle("lit", each.index === index));
  };
  for (const node of [...left, ...right]) {
    node.addEventListener("pointerenter", () => light(Number(node.dataset.index)));
    node.addEventListener("pointerleave", () => light(null));
  }
  return h("div", { class: "ranking" },
    h("section", { class: "before" }, h("h2", {}, beforeTitle), h("ol", {}, left)),
    picture,
    h("section", { class: "after" }, h("h2", {}, afterTitle), h("ol", {}, right)));
}

function curve(from, to) {
  const [start, end] = [from, to].map((place) => (place + 0.5) * ROW);
  const kind = from > to ? "up" : from < to ? "down" : "";
  return svg("path", { class: kind, d: `M 0 ${start} C ${WIDTH / 2} ${start}, ${WIDTH / 2} ${end}, ${WIDTH} ${end}` });
}

function movement(up, place) {
  const words = up === 0 ? "stayed" : `moved ${up > 0 ? "up" : "down"} by ${Math.abs(up)} from place ${place + 1}`;
  const sign = up === 0 ? "=" : `${up > 0 ? "▲" : "▼"}${Math.abs(up)}`;
  return [h("span", { "aria-hidden": "true" }, sign), h("span", { class: "visually-hidden" }, `${words}: `)];
}

export const tab = { id: "rerank", title: "Rerank", needs: "a model that scores pairs of texts or compares vectors", fits, build };
