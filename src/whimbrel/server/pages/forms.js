/** Fields of the tabs' forms: lines of text, one text, a model, a choice. Each is {node, ...} with its value as a getter. */

import { count, h, newId } from "./dom.js";

const HUGE = 50_000; // characters

function labelled(label, control, note) {
  control.id ||= newId("field");
  if (note) {
    note.id ||= newId("note");
    control.setAttribute("aria-describedby", note.id);
  }
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note);
}

/**
 * Return a field of one text per line: {node, lines, set(lines)}. `lines` has no empty ones and at most `max`; the field says
 * when there are more.
 */
export function linesField(label, { lines = [], max, rows = 4, noun = "line", nouns }) {
  const note = h("p", { class: "small muted", role: "status" });
  const area = h("textarea", { rows, spellcheck: "false", oninput: () => describe(), onbeforeinput: (event) => insertAtOnce(event, area) });
  function describe() {
    const total = read(area.value).length;
    const cut = total > max;
    note.className = cut ? "small warn-text" : "small muted";
    note.textContent = cut ? `${count(total, noun, nouns)}; only the first ${max.toLocaleString("en")} are used.` : count(total, noun, nouns);
  }
  const field = {
    node: labelled(label, area, note),
    control: area,
    get lines() {
      return read(area.value).slice(0, max);
    },
    set(texts) {
      area.value = texts.join("\n");
      describe();
    },
  };
  field.set(lines);
  return field;
}

/** Insert a huge text in one step. Browsers insert it line by line, which takes minutes. */
function insertAtOnce(event, area) {
  const text = event.data ?? event.dataTransfer?.getData("text/plain") ?? "";
  if (text.length < HUGE) return;
  event.preventDefault();
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  area.dispatchEvent(new Event("input", { bubbles: true }));
}

function read(value) {
  return value.split(/\r?\n/).filter((line) => line.trim() !== "");
}

/**
 * Return a field of one text: {node, text, set(text)}. With one row it is a single line, in which Enter runs the tab. `text` has at
 * most `max` characters; the field says when there are more.
 */
export function textField(label, { text = "", rows = 1, placeholder, max = Infinity } = {}) {
  const note = max === Infinity ? undefined : h("p", { class: "small warn-text", role: "status", hidden: true });
  const events = { oninput: describe, onbeforeinput: (event) => insertAtOnce(event, control) };
  const control = rows === 1
    ? h("input", { type: "text", spellcheck: "false", autocomplete: "off", placeholder, oninput: describe })
    : h("textarea", { rows, spellcheck: "false", placeholder, ...events });
  control.value = text;
  function describe() {
    if (!note) return;
    note.hidden = control.value.length <= max;
    note.textContent = note.hidden ? "" : `${count(control.value.length, "character")}; only the first ${max.toLocaleString("en")} are used.`;
  }
  return {
    node: labelled(label, control, note),
    control,
    get text() {
      const { value } = control;
      if (value.length <= max) return value;
      const splits = /[\uD800-\uDBFF]/.test(value[max - 1]); // half of a character that takes two places
      return value.slice(0, splits ? max - 1 : max);
    },
    set(value) {
      control.value = value;
      describe();
    },
  };
}

/** Return a choice: {node, value, setOptions(options)}. An option is a value, or [value, text]. A change runs the tab. */
export function choiceField(label, options, { value } = {}) {
  const control = h("select", {});
  const field = {
    node: labelled(label, control),
    control,
    get value() {
      return control.value;
    },
    setOptions(choices, chosen = control.value) {
      const pairs = choices.map((choice) => (Array.isArray(choice) ? choice : [choice, choice]));
      control.replaceChildren(...pairs.map(([key, text]) => h("option", { value: key }, text)));
      control.value = pairs.some(([key]) => key === chosen) ? chosen : (pairs[0]?.[0] ?? "");
    },
  };
  field.setOptions(options, value);
  return field;
}

/** Return a picker of models and their adapters: {node, name, model}. It is hidden where there is but one and `none` is not given. */
export function modelField(models, { label = "Model", none, value } = {}) {
  const options = models.flatMap((model) => model.names.map((name) => ({ name, model })));
  const names = options.map(({ name }) => name);
  const field = choiceField(label, none === undefined ? names : [["", none], ...names], { value });
  field.node.hidden = options.length < 2;
  return {
    node: field.node,
    control: field.control,
    get name() {
      return field.value;
    },
    get model() {
      return options.find(({ name }) => name === field.value)?.model;
    },
  };
}
