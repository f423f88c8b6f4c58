/** Entities: people, places and whatever else a model finds, marked in the text. */

import { cutNotice } from "./bars.js";
import { count, decimal, h } from "./dom.js";
import { choiceField, modelField, textField } from "./forms.js";
import { gives } from "./models.js";
import { workbench } from "./workbench.js";

const TEXT = `Charles Darwin left England in December and reached Brazil in spring.
Rachel Carson wrote about the sea; in Iceland, Anna counts whimbrels for BirdLife.`;
const HUES = 6; // colours of labels in views.css
const SHOWN = 400; // entities that are marked

function build(context) {
  const chosen = modelField(context.models);
  const aggregation = choiceField("Join tokens by", [["simple", "simple: equal labels"], ["first", "first token of a word"], ["average", "average of a word"], ["max", "maximum of a word"], ["none", "none: each token"]]);
  const text = textField("Text", { text: TEXT, rows: 8 });

  async function run(call) {
    if (!text.text.trim()) throw new Error("Write a text.");
    const answer = await call("/v1/token_classify", { model: chosen.name, input: [text.text], aggregation: aggregation.value });
    const [entities] = answer.data.entities;
    return [cutNotice(answer, chosen.model), marked(text.text, entities)];
  }

  return workbench(context, {
    intro: "Words of the text that the model gives a label.",
    fields: [h("div", { class: "row" }, chosen.node, aggregation.node), text.node],
    run,
    runLabel: "Find",
  });
}

/** Return the text with its entities marked. Their places count code points, as Python does. */
function marked(text, entities) {
  const points = Array.from(text);
  const labels = [...new Set(entities.map(({ label }) => label))].sort();
  const hue = (label) => `hue-${labels.indexOf(label) % HUES}`;
  const parts = [];
  let done = 0;
  for (const { label, score, start, end } of entities.slice(0, SHOWN)) {
    if (start < done) continue;
    parts.push(points.slice(done, start).join(""));
    parts.push(h("mark", { class: `entity ${hue(label)}`, data: { label, score, start, end }, title: `${label} ${score}` },
      points.slice(start, end).join(""), h("span", { class: "entity-label" }, h("span", { class: "visually-hidden" }, " ("), label, h("span", { class: "entity-score number" }, ` ${decimal(score, 2)}`), h("span", { class: "visually-hidden" }, ")"))));
    done = end;
  }
  parts.push(points.slice(done).join(""));
  const counts = labels.map((label) => h("span", { class: `key ${hue(label)}` }, h("span", { class: "swatch", "aria-hidden": "true" }), `${label} ${entities.filter((each) => each.label === label).length}`));
  const left = entities.length - SHOWN;
  return [
    h("p", { class: "small muted keys" }, entities.length ? [`${count(entities.length, "entity", "entities")}:`, counts] : "No entities."),
    h("div", { class: "marked" }, parts),
    left > 0 && h("p", { class: "notice" }, `The first ${SHOWN} entities are marked; ${left} more were found.`),
  ];
}

/** Return whether a model labels tokens with classes. Models that reward steps have one label, or two. */
function tags(model) {
  return gives(model, "token_scores") && model.card.labels.length > 2;
}

export const tab = { id: "entities", title: "Entities", needs: "a model that labels tokens", fits: (models) => models.filter(tags), build };
