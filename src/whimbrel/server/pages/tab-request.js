/** Request: the calls that the other tabs made, and the examples of all APIs, as code to paste. */

import { urlOf } from "./api.js";
import { copy, count, h, show } from "./dom.js";
import { choiceField } from "./forms.js";
import { examplesOf, snippetsOf } from "./snippets.js";

const SHOWN = 20_000;
const SENT = "As sent";
const HEADERS = ["x-whimbrel-tokens", "x-whimbrel-truncated", "x-request-id"];

function build(context) {
  const chosen = { api: choiceField("API", []), call: choiceField("Call", []), language: choiceField("Language", []) };
  const code = h("code", { id: "snippet" });
  const note = h("p", { class: "small muted", role: "status" });
  const about = h("div", { class: "call-facts" });
  const copy = h("button", { type: "button", class: "primary", onclick: copyAll }, "Copy");
  let examples = null;
  let calls = [];
  let snippets = [];
  let text = "";

  chosen.api.control.addEventListener("change", showApi);
  chosen.call.control.addEventListener("change", showCall);
  chosen.language.control.addEventListener("change", showCode);

  async function open() {
    examples ??= examplesOf((await context.api.call("/openapi.json")).data, context.all[0].name);
    const sent = context.api.log.length ? { [SENT]: [...context.api.log].reverse() } : {};
    chosen.api.setOptions(Object.keys({ ...sent, ...examples }), Object.keys(sent)[0]);
    showApi();
  }

  function showApi() {
    calls = chosen.api.value === SENT ? [...context.api.log].reverse() : examples[chosen.api.value];
    chosen.call.setOptions(calls.map((call, index) => [String(index), titleOf(call, context.titles)]), "0");
    showCall();
  }

  function showCall() {
    const call = calls[Number(chosen.call.value)];
    snippets = snippetsOf(call, { base: urlOf(""), withKey: context.api.hasKey });
    chosen.language.setOptions(snippets.map(({ id, title }) => [id, title]));
    show(about, call.headers && facts(call));
    showCode();
  }

  function showCode() {
    text = snippets.find(({ id }) => id === chosen.language.value).code;
    code.textContent = text.length > SHOWN ? `${text.slice(0, SHOWN)}…` : text;
    const cut = text.length > SHOWN ? `The first ${SHOWN.toLocaleString("en")} of ${count(text.length, "character")} are shown; Copy takes all. ` : "";
    note.textContent = cut + (context.api.hasKey ? "Set WHIMBREL_API_KEY to the key first; the code does not hold it." : "");
  }

  async function copyAll() {
    if (await copy(text)) {
      note.textContent = "Copied.";
    } else {
      getSelection().selectAllChildren(code);
      note.textContent = "This browser gives pages no clipboard here; the code is selected, so copy it with Ctrl+C.";
    }
  }

  const form = h("div", { class: "inputs" },
    h("p", { class: "intro muted" }, "What the other tabs asked, and an example of each route, as code to paste into a program."),
    h("div", { class: "row" }, chosen.api.node, chosen.language.node), chosen.call.node, about);
  const result = h("div", { class: "output" }, h("div", { class: "snippet" }, h("div", { class: "snippet-bar" }, copy, note), h("pre", { tabindex: "0", "aria-label": "Code" }, code)));
  return { node: h("div", { class: "workbench" }, form, result), open };
}

function titleOf({ tab, path, body, ms, about }, titles) {
  if (about) return `POST ${path}: ${about}`;
  const texts = body?.input ?? body?.inputs ?? body?.documents ?? [];
  const size = Array.isArray(texts) ? `, ${count(texts.length, "text")}` : "";
  return `${titles[tab]}: POST ${path}${size}, ${ms.toFixed(0)} ms`;
}

/** Return what is known of an answer: the time of each stage, and some headers. */
function facts({ status, ms, headers }) {
  const stages = (headers.get("server-timing") ?? "").split(",").map((part) => part.trim().split(";dur=")).filter(([, duration]) => duration);
  const rows = [["Status", status], ["Time in the browser", `${ms.toFixed(1)} ms`], ...stages.map(([name, duration]) => [name === "total" ? "Server in all" : `Server: ${name}`, `${duration} ms`])];
  for (const name of HEADERS) if (headers.get(name)) rows.push([name, headers.get(name)]);
  return h("dl", { class: "facts small" }, rows.map(([term, value]) => [h("dt", {}, term), h("dd", { class: "number" }, String(value))]));
}

export const tab = { id: "request", title: "Request", needs: "a model", fits: (models) => models, build };
