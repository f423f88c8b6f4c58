/** Frame of a tab: its form, Run and Stop, progress and errors, and the place of its result. */

import { h, show } from "./dom.js";

const RELOAD = "Reload the page to see what the server serves now.";

/** Return a sentence for an error; one that the code did not expect goes to the console, too. */
function describe(error) {
  if (error.status === 404) return `${error.message} ${RELOAD}`;
  if (error.constructor === Error || error.kind) return error.message;
  console.error(error);
  return `This page cannot read the answer; the server may be of another version. ${RELOAD}`;
}

/**
 * Return {node, open()} of a tab.
 *
 * `run(call, say)` reads the fields, asks the API by `call(path, body)`, which gives {data, headers, ms}, and returns the nodes to
 * show. `say(text, share)` tells progress, `share` of 0 to 1. It throws Error with a sentence for the user where a field is wrong.
 * A new run aborts the one before it; only the newest run's result is shown. Enter in a line, Ctrl+Enter in an area, or a change of
 * a choice run it, and so does the first opening.
 */
export function workbench(context, { intro, fields, run, runLabel = "Run" }) {
  let current = null;
  let opened = false;
  const button = h("button", { class: "primary", type: "submit" }, runLabel);
  const stop = h("button", { type: "button", hidden: true, onclick: () => cancel() }, "Stop");
  const bar = h("progress", { max: "1", hidden: true, "aria-label": "Progress" });
  const notice = h("div", { class: "run-notice", role: "status" });
  const output = h("div", { class: "output" });
  const form = h(
    "form",
    { class: "inputs", autocomplete: "off", onsubmit: submit, onkeydown: keys, onchange: change },
    intro && h("p", { class: "intro muted" }, intro),
    fields,
    h("div", { class: "actions" }, button, stop, h("span", { class: "hint small muted" }, h("kbd", {}, "Ctrl"), " ", h("kbd", {}, "Enter"))),
    bar,
    notice,
  );

  function submit(event) {
    event.preventDefault();
    start();
  }

  function keys(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  }

  function change(event) {
    if (event.target.tagName === "SELECT" || event.target.type === "checkbox") start();
  }

  function cancel() {
    current?.abort();
    current = null;
    finish();
    tell("Stopped.", "");
  }

  function tell(text, kind, action) {
    show(notice, text && h("div", { class: `notice ${kind}` }, h("span", {}, text), action));
  }

  function finish() {
    stop.hidden = true;
    bar.hidden = true;
    output.setAttribute("aria-busy", "false");
  }

  async function start() {
    current?.abort();
    const controller = new AbortController();
    current = controller;
    const own = () => current === controller;
    const say = (text, share) => {
      if (!own()) return;
      tell(text, "");
      bar.hidden = share === undefined;
      if (share !== undefined) bar.value = share;
    };
    const onwait = (text) => own() && tell(text, "warn");
    const call = (path, body) => context.api.call(path, body, { signal: controller.signal, onwait, tab: context.id });
    tell("", "");
    stop.hidden = false;
    output.classList.add("old"); // until it is that of the fields as they are
    output.setAttribute("aria-busy", "true");
    try {
      const nodes = await run(call, say, controller.signal);
      if (!own()) return;
      show(output, nodes);
      output.classList.remove("old");
      tell("", "");
    } catch (error) {
      if (!own() || error.name === "AbortError") return;
      tell(describe(error), "error", error.kind && h("button", { type: "button", onclick: start }, "Try again"));
    }
    if (own()) finish();
  }

  return {
    node: h("div", { class: "workbench" }, form, output),
    open() {
      if (!opened) start();
      opened = true;
    },
  };
}
