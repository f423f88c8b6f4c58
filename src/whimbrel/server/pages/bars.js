/** Bars of numbers, and what the tabs of scores share. */

import { decimal, h } from "./dom.js";

/**
 * Return a list item with a label, a bar of `value` relative to `max`, and the number. `kind` is a class of the item,
 * `note` is read to the label, and `data` are data attributes.
 */
export function bar({ label, value, max, kind = "", note, data = {} }) {
  const share = max > 0 ? Math.min(1, Math.max(0, value / max)) : 0;
  return h("li", { class: `bar ${kind}`, data: { ...data, value } },
    h("span", { class: "bar-label" }, label, note && h("span", { class: "visually-hidden" }, ` (${note})`)),
    h("span", { class: "bar-track", "aria-hidden": "true" }, h("span", { class: "bar-fill", css: { "--share": `${(100 * share).toFixed(2)}%` } })),
    h("span", { class: "bar-value number" }, decimal(value)),
  );
}

/** Return a notice where `cut` texts of an answer were cut at the model's limit, else null. */
export function cutNotice({ cut }, model) {
  if (!cut) return null;
  const texts = cut === 1 ? "One text was" : `${cut} texts were`;
  return h("p", { class: "notice warn" }, `${texts} cut: ${model.name} takes ${model.plan.max_length.toLocaleString("en")} tokens.`);
}

/** Return the fields of a body that choose the output by which a model compares, where it has several. */
export function scoredBy(model, output) {
  return model.outputs.length > 1 ? { score_by: output } : {};
}
