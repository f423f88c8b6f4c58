/** The key and the models that are served, for all forms of the API reference. The key stays in memory. */

import { messageOf, urlOf } from "./api.js";
import { h, newId, show } from "./dom.js";
import { gives, readModels } from "./models.js";

/** Kinds of models as the page's data-made-for names them: those made for a route, then those that may answer it too. */
const KINDS = {
  dense: [(model) => gives(model, "dense"), (model) => gives(model, "multi_vector")],
  sparse: [(model) => gives(model, "sparse")],
  multi_vector: [(model) => gives(model, "multi_vector")],
  ranking: [(model) => model.card.outputs.scores?.width === 1, (model) => gives(model, "multi_vector"), (model) => gives(model, "dense")],
  classes: [(model) => model.card.outputs.scores?.width > 1, (model) => gives(model, "scores")],
  entities: [(model) => gives(model, "token_scores")],
};

/** Return {keyField, notice, key, needsKey, models, choose(kind), load(), refused(), ask(), onchange(f)} for a server that may need a key. */
export function served(needsKey) {
  const input = h("input", { type: "text", class: "secret", id: newId("key"), autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
  const note = h("p", { class: "small muted", id: newId("note") }, "It stays in this page's memory and is sent to this server alone.");
  input.setAttribute("aria-describedby", note.id);
  const keyField = h("div", { class: "field keyfield", hidden: !needsKey }, h("label", { for: input.id }, "API key"), input, note);
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const listeners = [];
  const state = {
    keyField,
    notice,
    needsKey,
    models: [],
    get key() {
      return input.value.trim();
    },
    onchange(listener) {
      listeners.push(listener);
    },
    /** Return the name of the served model that fits a kind of route best, whether it is made for it, and whether it answers. */
    choose(kind) {
      for (const [rank, fits] of (KINDS[kind] ?? [() => true]).entries()) {
        const model = state.models.find(fits);
        if (model) return { name: model.name, suits: rank === 0, answers: true };
      }
      return { name: state.models[0]?.name ?? "", suits: false, answers: false };
    },
    /** Ask what is served. Without a key, where one is needed, the page says so and asks nothing. */
    async load() {
      if (state.needsKey && !state.key) return tell("Type the API key to send requests and to fill in the name of a served model.");
      try {
        const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
        const response = await fetch(urlOf("info"), { headers, cache: "no-store" });
        const data = await response.json();
        if (response.status === 401) return state.refused();
        if (!response.ok) return tell(`The models are not known yet: ${messageOf(data)}`, true);
        state.models = readModels(data);
        if (!state.models.length) return tell("The models are being loaded.", true);
        tell("");
        for (const listener of listeners) listener();
      } catch {
        tell("No connection to the server. It may have stopped, or the network is down.", true);
      }
    },
    /** Ask for the key: an answer has status 401, or a form is sent without one. */
    refused() {
      state.needsKey = true;
      keyField.hidden = false;
      const text = state.key ? "The server refused this key. Check it, and that it has no spaces." : "This server needs an API key. Type it above; then send again.";
      tell(text, false, "notice warn");
    },
    ask() {
      state.refused();
      input.focus();
    },
  };
  function tell(text, again = false, style = "notice") {
    notice.hidden = text === "";
    notice.className = style;
    show(notice, h("span", {}, text), again && h("button", { type: "button", onclick: () => state.load() }, "Try again"));
  }
  input.addEventListener("change", () => state.load());
  input.addEventListener("keydown", (event) => event.key === "Enter" && state.load());
  return state;
}
