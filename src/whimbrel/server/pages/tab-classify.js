/** Classify: the labels of texts with their scores. */

import { bar, cutNotice } from "./bars.js";
import { count, h, shorten } from "./dom.js";
import { linesField, modelField } from "./forms.js";
import { gives, judgesPairs } from "./models.js";
import { workbench } from "./workbench.js";

const TEXTS = ["A whimbrel sings over the moor.", "The night train to Lisbon is full.", "This soup needs more salt!"];
const MAX_TEXTS = 30;
const SHOWN = 8; // labels of a text

function build(context) {
  const chosen = modelField(context.models);
  const texts = linesField("Texts, one a line", { lines: TEXTS, max: MAX_TEXTS, rows: 7, noun: "text" });

  async function run(call) {
    const lines = texts.lines;
    if (!lines.length) throw new Error("Write at least one text.");
    const answer = await call("/v1/classify", { model: chosen.name, input: lines });
    const { labels, scores } = answer.data;
    const max = Math.max(1, ...scores.flat());
    return [cutNotice(answer, chosen.model), h("div", { class: "cards" }, lines.map((line, place) => figure(line, place, labels, scores[place], max)))];
  }

  return workbench(context, {
    intro: "The labels that the model was trained for, with the score of each.",
    fields: [chosen.node, texts.node],
    run,
    runLabel: "Classify",
  });
}

function figure(text, place, labels, scores, max) {
  const order = scores.map((_, label) => label).sort((left, right) => scores[right] - scores[left]);
  const items = order.map((label, row) => bar({ label: labels[label], value: scores[label], max, kind: row ? "" : "hit", data: { label: labels[label] } }));
  const rest = items.slice(SHOWN);
  return h("figure", { class: "card", data: { text: place } },
    h("figcaption", {}, h("h3", {}, shorten(text, 200))),
    h("ul", { class: "bars" }, items.slice(0, SHOWN)),
    rest.length > 0 && h("details", {}, h("summary", { class: "small" }, `${count(rest.length, "label")} more`), h("ul", { class: "bars" }, rest)));
}

/** Return whether a model gives each text scores of several classes. */
function classifies(model) {
  return gives(model, "scores") && !judgesPairs(model) && model.card.labels.length > 1;
}

export const tab = { id: "classify", title: "Classify", needs: "a classifier", fits: (models) => models.filter(classifies), build };
