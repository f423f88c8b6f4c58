/** Tokens: how the model reads a text, with its prompt and special tokens, and which part is cut by which limit. */

import { count, h } from "./dom.js";
import { choiceField, modelField, textField } from "./forms.js";
import { hasRoles, judgesPairs } from "./models.js";
import { workbench } from "./workbench.js";

const EXAMPLE =
  "Whimbrels (Numenius phaeopus) are long-distance travellers: some fly 7,000 km without a stop. " +
  "They breed in the subarctic tundra and spend the winter on tropical coasts, where they pick fiddler crabs from the mud.";
const MAX = 100_000; // characters
const SHOWN = 4000;

function build(context) {
  const model = modelField(context.models);
  const text = textField("Text", { text: EXAMPLE, rows: 7, max: MAX });
  const prompt = choiceField("Prompt", []);
  const role = choiceField("Text is", [["", "neither"], ["query", "a query"], ["document", "a document"]]);
  const side = choiceField("Cut at", [["right", "the end"], ["left", "the start"]]);
  const limit = textField("Limit in tokens", { text: "40", placeholder: "the model's" });
  limit.control.inputMode = "numeric";
  model.control.addEventListener("change", adapt);
  adapt();

  function adapt() {
    const { card } = model.model;
    const names = Object.keys(card.prompts);
    prompt.setOptions([["auto", "as the model does"], ["none", "none"], ...names.map((name) => [`=${name}`, `${name}: ${JSON.stringify(card.prompts[name])}`])]);
    prompt.node.hidden = names.length === 0;
    role.node.hidden = !hasRoles(model.model);
    role.control.value = role.node.hidden ? "" : role.value || "query";
    side.control.value = card.tokenizer.truncate;
    if (Object.keys(card.text_formats).length) limit.set("");
  }

  async function run(call) {
    const stated = limit.text.trim().replaceAll(",", "");
    if (stated && !/^[1-9]\d{0,8}$/.test(stated)) throw new Error("The limit is a whole number of tokens, or empty for the model's own.");
    const chosen = { name: model.name, model: model.model, role: role.value || undefined, side: side.value, limit: stated ? Number(stated) : undefined };
    const promptName = prompt.value === "auto" ? promptOf(chosen.model.card, chosen.role) : prompt.value === "none" ? undefined : prompt.value.slice(1);
    const { data } = await call("/tokenize", { model: chosen.name, inputs: text.text, ...(promptName !== undefined && { prompt_name: promptName }) });
    const counted = judgesPairs(chosen.model) ? undefined : await counts(call, text.text, chosen, promptName);
    const prefix = promptName === undefined ? "" : chosen.model.card.prompts[promptName];
    return result(chosen, data[0], counted, prefix, text.text);
  }

  return workbench(context, {
    intro: "How the model reads a text: its tokens, what is put around it, and what a limit cuts off.",
    fields: [model.node, text.node, prompt.node, h("div", { class: "row" }, role.node, limit.node, side.node)],
    run,
    runLabel: "Show tokens",
  });
}

/** Return the name of the prompt that a text gets by default, by the conventions of Sentence Transformers. */
function promptOf(card, role) {
  const names = { query: ["query"], document: ["document", "passage", "corpus"] }[role] ?? [];
  return names.find((name) => name in card.prompts) ?? card.default_prompt_name ?? undefined;
}

/** Return what the model computes of the text: {total, truncated}. */
async function counts(call, input, { name, role, side, limit }, promptName) {
  const prompt = promptName === undefined ? { prompt: "" } : { prompt_name: promptName };
  const { data, cut } = await call("/v1/embed", {
    model: name, input: [input], ...prompt, ...(role && { input_type: role }), truncate: side, ...(limit && { max_tokens: limit }), encoding_format: "base64",
  });
  return { total: data.usage.prompt_tokens, truncated: cut > 0 };
}

/**
 * Return the half-open range of tokens that are cut: `kept` of them stay, and special tokens around the text always do.
 */
function cutRange(tokens, kept, side) {
  let before = 0;
  while (before < tokens.length && tokens[before].special) before += 1;
  let after = 0;
  while (after < tokens.length - before && tokens[tokens.length - 1 - after].special) after += 1;
  const own = Math.max(0, kept - before - after);
  return side === "left" ? [before, tokens.length - after - own] : [before + own, tokens.length - after];
}

function result({ name, model, role, side, limit }, tokens, counted, prompt, text) {
  const form = model.card.text_formats[role];
  const own = Math.min(form?.max_length ?? Infinity, model.plan.max_length);
  const used = limit ?? own;
  const marker = form?.marker_id != null ? 1 : 0;
  const total = counted?.total ?? Math.min(tokens.length, used);
  const truncated = counted ? counted.truncated : tokens.length > used;
  const cut = truncated ? cutRange(tokens, total - marker, side) : [0, 0];
  const numCut = cut[1] - cut[0];
  const added = truncated ? marker : Math.max(0, total - tokens.length);
  const numSpecial = tokens.filter((token) => token.special).length;
  const promptLength = Array.from(prompt).length;
  const numPrompt = tokens.filter((token) => !token.special && token.start < promptLength).length;
  const kinds = { promptLength, cut };
  return h("div", { class: "tokens-result", data: { model: name, total, cut: numCut, count: tokens.length } },
    h("h2", {}, `${count(total, "token")} of ${name}`),
    h("p", { class: numCut ? "notice warn" : "notice" }, h("span", {}, reason({ numCut, used, limit, own, side, role: form && role, model, counted }))),
    h("dl", { class: "facts small" }, [
      ["Text", `${count(Array.from(text).length, "character")}, ${count(tokens.length - numSpecial - numPrompt, "token")}`],
      ["Prompt", prompt ? `${JSON.stringify(prompt)}, ${count(numPrompt, "token")}` : "none"],
      ["Special tokens", numSpecial ? tokens.filter((token) => token.special).slice(0, 6).map(({ text: each }) => each).join(" ") : "none"],
      added ? ["Added by the model", `${count(added, "token")}: ${addition(model, form, marker, added)}`] : null,
      ["Limit", `${count(own, "token")}${form ? ` of a ${role}` : ""}${limit ? `; ${limit.toLocaleString("en")} here` : ""}`],
    ].filter(Boolean).map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)])),
    h("ol", { class: "tokens", "aria-label": "Tokens" }, chips(tokens.slice(0, SHOWN), kinds, { marker: form?.marker_id, filled: form?.expansion ? added - marker : 0 })),
    tokens.length > SHOWN && h("p", { class: "small muted" }, `The first ${SHOWN.toLocaleString("en")} of ${count(tokens.length, "token")} are shown.`),
    h("p", { class: "small muted token-key" }, h("span", { class: "token special" }, "special"), h("span", { class: "token prompt" }, "prompt"), h("span", { class: "token" }, "text"), h("span", { class: "token cut" }, "cut")),
  );
}

function addition(model, form, marker, added) {
  if (model.card.text_template) return "its chat template around the text";
  const parts = [marker > 0 && "a marker of the text's kind", form?.expansion && added > marker && "tokens that fill up a short text"].filter(Boolean);
  return parts.join(" and ") || "around the text";
}

function reason({ numCut, used, limit, own, side, role, model, counted }) {
  const what = role ? `a ${role}` : "a text";
  if (!numCut) {
    const room = `Nothing is cut: the limit is ${count(used, "token")}${limit && limit !== own ? ", as you set it" : ` of ${what}`}.`;
    return model.plan.split_long ? `${room} Longer texts run in parts (split_long).` : room;
  }
  const where = side === "left" ? "at the start" : "at the end";
  const whose = limit && limit < own ? `your limit of ${count(used, "token")}` : `the limit of ${count(own, "token")} for ${what}`;
  const stated = !limit && !role && own < model.card.max_length ? `, which --max-length set (the model allows ${model.card.max_length.toLocaleString("en")})` : "";
  const pair = counted ? "" : " A pair shares the limit, so its query takes some of it.";
  return `${count(numCut, "token")} ${where} ${numCut === 1 ? "is" : "are"} cut: ${whose}${stated} includes prompt and special tokens.${pair}`;
}

/** Return an item per token, and items for those that the model adds to texts of a role. */
function chips(tokens, kinds, { marker, filled }) {
  const items = tokens.map((token, index) => chip(token, index, kinds));
  if (marker != null) items.splice(1, 0, h("li", { class: "token special", title: `id ${marker}` }, "marker"));
  if (filled > 0) items.push(h("li", { class: "token special" }, `${count(filled, "token")} to fill up`));
  return items;
}

function chip(token, index, { promptLength, cut }) {
  const isCut = index >= cut[0] && index < cut[1];
  const kind = token.special ? "special" : token.start < promptLength ? "prompt" : "text";
  const words = [kind === "text" ? "" : kind, isCut ? "cut" : ""].filter(Boolean).join(", ");
  const place = token.start === null ? "" : `, characters ${token.start} to ${token.stop}`;
  return h("li", { class: `token ${kind}${isCut ? " cut" : ""}`, title: `id ${token.id}${place}`, data: { id: token.id, cut: isCut, kind } },
    visible(token.text), words && h("span", { class: "visually-hidden" }, ` (${words})`));
}

/** Return a token's text with its white space made visible. */
function visible(text) {
  return text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
}

export const tab = { id: "tokens", title: "Tokens", needs: "a model with a tokenizer", fits: (models) => models, build };
