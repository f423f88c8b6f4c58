/** Late interaction: query tokens by document tokens, the best match of each, and the score as a running sum of these. */

import { scoredBy } from "./bars.js";
import { breathe, count, decimal, h, show } from "./dom.js";
import { linesField, modelField, textField } from "./forms.js";
import { heat, legend } from "./heat.js";
import { gives } from "./models.js";
import { decodeFloats, dot } from "./vectors.js";
import { workbench } from "./workbench.js";

const QUERY = "Where do birds go in winter?";
const DOCUMENTS = [
  "In winter the hotels on the coast are closed.",
  "Swallows fly to Africa in autumn and stay until spring.",
  "A sandwich has two slices of bread.",
];
const MAX_DOCUMENTS = 8;
const MAX_COLUMNS = 64; // tokens of a document that the table shows
const MAX_ROWS = 48;

function build(context) {
  const chosen = modelField(context.models);
  const query = textField("Query", { text: QUERY });
  const documents = linesField("Documents, one a line", { lines: DOCUMENTS, max: MAX_DOCUMENTS, rows: 7, noun: "document" });

  async function run(call) {
    const { model, name } = chosen;
    const texts = documents.lines;
    if (!query.text.trim() || !texts.length) throw new Error("Write a query and at least one document.");
    const pooling = Object.keys(model.card.outputs.multi_vector.token_pooling ?? {}).length ? { token_pooling: 1 } : {};
    const options = { model: name, ...pooling };
    const [queryVectors] = await tokenVectors(call, [query.text], { ...options, input_type: "query" });
    const vectors = await tokenVectors(call, texts, { ...options, input_type: "document" });
    const { data } = await call("/v1/score", { ...options, queries: query.text, documents: texts, explain: true, ...scoredBy(model, "multi_vector") });
    const found = [];
    for (const { index, score, explanation } of data.data) {
      found.push(readMatch(texts[index], index, score, explanation, queryVectors, vectors[index]));
      await breathe();
    }
    const kind = model.card.similarity ?? model.card.outputs.multi_vector.similarity;
    return explorer(found, kind === "meanmaxsim");
  }

  return workbench(context, {
    intro: "Each query token is compared with each document token. Its best match counts, and the score is the sum of these.",
    fields: [chosen.node, query.node, documents.node],
    run,
    runLabel: "Match",
  });
}

/** Return each text's token vectors, a list of Float32Array per text, by /v1/embed. */
async function tokenVectors(call, input, options) {
  const { data } = await call("/v1/embed", { input, outputs: ["multi_vector"], encoding_format: "base64", ...options });
  return data.outputs.multi_vector.map(({ shape: [tokens, width], data: bytes }) => {
    const numbers = decodeFloats(bytes);
    return Array.from({ length: tokens }, (_, row) => numbers.subarray(row * width, (row + 1) * width));
  });
}

function readMatch(text, index, score, explanation, queryVectors, vectors) {
  const { query_tokens: queryTokens, document_tokens: tokens, maxima, places } = explanation;
  const similarities = queryVectors.slice(0, MAX_ROWS).map((left) => vectors.map((right) => dot(left, right)));
  return { text, index, score, queryTokens, tokens, maxima, places, similarities };
}

/** Return the columns to show: the tokens that match best, then the first ones, in the order of the document. */
function columnsOf({ tokens, places }) {
  const columns = new Set(places.slice(0, MAX_ROWS).filter((place) => place >= 0));
  for (let place = 0; place < tokens.length && columns.size < MAX_COLUMNS; place += 1) columns.add(place);
  return [...columns].sort((left, right) => left - right);
}

async function explorer(found, mean) {
  const tokens = found[0].queryTokens.slice(0, MAX_ROWS);
  const hidden = found[0].queryTokens.length - tokens.length;
  const struck = new Set();
  const range = { low: 0, high: Math.max(0.01, ...found.flatMap(({ maxima }) => maxima)) };
  const cards = [];
  for (const match of found) {
    cards.push(card(match, tokens.length, range, mean, light));
    await breathe();
  }
  const chips = tokens.map((token, row) => h("button", {
    class: "chip", type: "button", "aria-pressed": "false", data: { row },
    onclick: () => strike(row), onpointerenter: () => light(row), onpointerleave: () => light(null), onfocus: () => light(row), onblur: () => light(null),
  }, token));
  const restore = h("button", { class: "plain", type: "button", hidden: true, onclick: () => strike(null) }, "Restore all");
  const note = h("p", { class: "small muted", role: "status" });
  const list = h("ol", { class: "matches" }, cards.map(({ node }) => node));
  order();

  function light(row) {
    for (const each of cards) each.light(row);
    chips.forEach((chip, place) => chip.classList.toggle("lit", place === row));
  }

  function strike(row) {
    if (row === null) struck.clear();
    else if (!struck.delete(row)) struck.add(row);
    chips.forEach((chip, place) => chip.setAttribute("aria-pressed", String(struck.has(place))));
    restore.hidden = struck.size === 0;
    if (restore.hidden && document.activeElement === document.body) chips[0].focus();
    order();
  }

  function order() {
    for (const each of cards) each.update(struck);
    const sorted = [...cards].sort((left, right) => right.total - left.total || left.match.index - right.match.index);
    const tops = new Map(cards.map(({ node }) => [node, node.getBoundingClientRect().top]));
    const moved = sorted.some(({ node }, place) => list.children[place] !== node);
    if (moved) list.append(...sorted.map(({ node }) => node));
    sorted.forEach((each, place) => each.place(place + 1));
    if (moved) slide(tops);
    const without = struck.size ? `${count(struck.size, "token")} struck out. ` : "";
    note.textContent = `${without}Order: ${sorted.map(({ match }) => `document ${match.index + 1}`).join(", ")}.`;
  }

  return [
    h("section", { class: "query-tokens", "aria-label": "Tokens of the query" },
      h("div", { class: "chips" }, chips, restore),
      h("p", { class: "small muted" }, "Point at a token to light its best match in each document; click it to strike it out.", hidden > 0 && ` ${count(hidden, "token")} more count in the score and are not shown.`),
      h("div", { class: "line" }, note, legend(range)),
    ),
    list,
  ];
}

/** Let nodes glide from where they were, unless the user wants no motion. */
function slide(tops) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const [node, top] of tops) {
    const distance = top - node.getBoundingClientRect().top;
    if (distance) node.animate([{ transform: `translateY(${distance}px)` }, { transform: "none" }], { duration: 220, easing: "ease-out" });
  }
}

function card(match, numRows, range, mean, light) {
  const columns = columnsOf(match);
  const heads = new Map(columns.map((place) => [place, h("th", { scope: "col", class: "column" }, h("span", {}, match.tokens[place]))]));
  const sums = [];
  const rows = Array.from({ length: numRows }, (_, row) => {
    const sum = h("td", { class: "sum" });
    sums.push(sum);
    const cells = columns.map((place) => cell(match, row, place, range));
    return h("tr", { onpointerenter: () => light(row), onpointerleave: () => light(null) },
      h("th", { scope: "row", class: "piece" }, match.queryTokens[row]),
      h("td", { class: "max", data: { max: match.maxima[row] } }, decimal(match.maxima[row], 2)), sum, cells);
  });
  const rank = h("span", { class: "rank" });
  const score = h("strong", { class: "score number" });
  const was = h("span", { class: "small muted number" });
  const left = match.tokens.length - columns.length;
  const node = h("li", { class: "match", data: { index: match.index, score: match.score } },
    h("div", { class: "match-head" }, rank, h("h3", {}, match.text), h("span", { class: "match-score" }, score, was)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Similarities of document ${match.index + 1}` },
      h("table", { class: "token-table" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Query"), h("th", { scope: "col", class: "max" }, "best"), h("th", { scope: "col", class: "sum" }, "sum"), [...heads.values()])),
        h("tbody", {}, rows))),
    left > 0 && h("p", { class: "small muted" }, `${columns.length} of ${match.tokens.length} tokens are shown, among them the best matches.`));
  const self = {
    match,
    node,
    total: match.score,
    /** Compute the running sum without the struck tokens. */
    update(struck) {
      let sum = 0;
      let kept = 0;
      match.maxima.forEach((value, row) => {
        if (!struck.has(row)) {
          sum += value;
          kept += 1;
        }
        if (row >= numRows) return;
        rows[row].classList.toggle("struck", struck.has(row));
        sums[row].textContent = struck.has(row) ? "–" : decimal(sum, 2);
        sums[row].dataset.sum = sum;
      });
      self.total = mean ? sum / Math.max(1, kept) : sum;
      node.dataset.total = self.total;
      score.textContent = decimal(self.total);
      show(was, struck.size ? `all tokens ${decimal(match.score)}` : mean ? "mean of the best" : "");
    },
    place(number) {
      rank.textContent = number;
      node.dataset.rank = number;
    },
    light(row) {
      rows.forEach((line, place) => line.classList.toggle("lit", place === row));
      for (const [place, head] of heads) head.classList.toggle("lit", row !== null && match.places[row] === place);
    },
  };
  return self;
}

function cell(match, row, place, range) {
  const value = match.similarities[row]?.[place];
  if (value === undefined) return h("td", {}, "");
  const best = match.places[row] === place;
  const node = h("td", { class: best ? "best" : "", data: { similarity: value, row, place } }, decimal(value, 2), best && h("span", { class: "visually-hidden" }, " (best)"));
  return heat(node, value, range);
}

export const tab = { id: "late", title: "Late interaction", needs: "a late-interaction model, such as ColBERT", fits: (models) => models.filter((model) => gives(model, "multi_vector")), build };
