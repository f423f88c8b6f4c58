/** A form that sends a request to one route and shows the answer, and the same request as curl. */

import { urlOf } from "./api.js";
import { copyButton, showAnswer } from "./docs-answer.js";
import { h, newId, show } from "./dom.js";
import { shellQuoted } from "./snippets.js";

const built = new WeakSet();

/** Put a form into a route's element, once. `server` is that of `served`. */
export function buildTry(route, server) {
  if (built.has(route)) return;
  built.add(route);
  const { method, path, example, madeFor, accept, model: takesModel } = route.dataset;
  const panel = route.querySelector(".try");
  const code = panel.querySelector("pre.curl code");
  const kinds = accept.split(" ");
  let edited = false;
  let running = null;

  const body = example && h("textarea", { id: newId("body"), spellcheck: "false", autocapitalize: "off" });
  const inPath = path.includes("{model}");
  const model = labelled("Model", h("select", {}));
  const kind = labelled("Accept", h("select", {}, kinds.map((each) => h("option", { value: each }, each))));
  kind.node.hidden = !body || kinds.length < 2;
  model.node.hidden = true;
  const advice = h("p", { class: "small muted" });
  const send = h("button", { type: "button", class: "primary" }, "Send");
  const reset = body && h("button", { type: "button", class: "plain" }, "Reset");
  const reply = h("div", { class: "reply", role: "status" });

  const url = () => urlOf(path.replace("{model}", () => (model.control.value || "MODEL").split("/").map(encodeURIComponent).join("/")));

  /** Return the body of the example, with the model first. */
  function filled() {
    const fields = JSON.parse(example);
    return JSON.stringify(takesModel && model.control.value ? { model: model.control.value, ...fields } : fields, null, 2);
  }

  function fill() {
    if (body && !edited) {
      body.value = filled();
      body.rows = Math.min(16, body.value.split("\n").length + 1);
    }
    describe();
  }

  function describe() {
    const parts = [`curl ${shellQuoted(url())}`];
    if (server.needsKey) parts.push(`-H "Authorization: Bearer $WHIMBREL_API_KEY"`);
    if (kind.control.value !== kinds[0]) parts.push(`-H ${shellQuoted(`Accept: ${kind.control.value}`)}`, "--output answer.bin");
    if (body) parts.push("-H 'Content-Type: application/json'", `-d ${shellQuoted(body.value)}`);
    code.textContent = parts.join(" \\\n  ");
  }

  function offer() {
    const names = server.models.flatMap(({ names: all }) => all);
    const { name, suits, answers } = server.choose(madeFor);
    show(model.control, names.map((each) => h("option", { value: each }, each)));
    model.control.value = name;
    model.node.hidden = !(takesModel || inPath) || names.length < (inPath ? 1 : 2);
    advice.hidden = suits || names.length === 0;
    advice.textContent = answers
      ? `No served model is made for this route; ${name} answers it${madeFor === "ranking" ? " by the similarity of its vectors" : ""}.`
      : "No served model is made for this route. Send it to see what the server says.";
    fill();
  }

  /** Put the chosen model into the body as it is, if it can be read. */
  function rename() {
    if (body && edited) {
      try {
        body.value = JSON.stringify({ ...JSON.parse(body.value), model: model.control.value }, null, 2);
      } catch {
        // the text stays as it was typed
      }
    }
    fill();
  }

  async function run() {
    if (running) return running.abort();
    if (server.needsKey && !server.key && !route.dataset.open) return server.ask();
    running = new AbortController();
    send.textContent = "Stop";
    const start = performance.now();
    try {
      const headers = body ? { "content-type": "application/json", accept: kind.control.value } : {};
      if (server.key) headers.authorization = `Bearer ${server.key}`;
      const options = { method, headers, body: body ? body.value : undefined, signal: running.signal, cache: "no-store" };
      const response = await fetch(url(), options);
      const bytes = new Uint8Array(await response.arrayBuffer());
      showAnswer(reply, { response, bytes, ms: performance.now() - start, dtype: dtypeOf(body?.value) });
      if (response.status === 401) server.refused();
      else if (response.ok && !server.models.length) server.load();
    } catch (error) {
      const text = error.name === "AbortError" ? "Stopped." : "No connection to the server. It may have stopped, or the network is down.";
      show(reply, h("p", { class: error.name === "AbortError" ? "notice" : "notice error" }, text));
    } finally {
      running = null;
      send.textContent = "Send";
    }
  }

  const jump = h("button", { type: "button", class: "plain jump" }, "Try it");
  jump.addEventListener("click", () => {
    panel.scrollIntoView();
    body.focus({ preventScroll: true });
  });
  if (body) route.querySelector(".body").prepend(jump);

  send.addEventListener("click", run);
  reset?.addEventListener("click", () => {
    edited = false;
    show(reply);
    offer();
  });
  body?.addEventListener("input", () => {
    edited = true;
    describe();
  });
  body?.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  });
  model.control.addEventListener("change", rename);
  kind.control.addEventListener("change", describe);
  server.onchange(offer);
  const pre = code.parentElement;
  show(
    panel,
    h("h4", {}, "Try it"),
    h("div", { class: "fields" }, model.node, kind.node),
    body && h("div", { class: "field" }, h("label", { for: body.id }, "Body"), body),
    advice,
    h("div", { class: "actions" }, send, reset, body && h("span", { class: "small muted keys" }, h("kbd", {}, "Ctrl"), " ", h("kbd", {}, "Enter"))),
    reply,
    h("div", { class: "command" }, "The same as curl", copyButton(() => code.textContent)),
    pre,
  );
  offer();
}

function labelled(label, control) {
  control.id = newId("field");
  return { control, node: h("div", { class: "field" }, h("label", { for: control.id }, label), control) };
}

/** Return the type of numbers that a body asks for. */
function dtypeOf(text) {
  try {
    return JSON.parse(text).embed_dtype ?? "float32";
  } catch {
    return "float32";
  }
}
