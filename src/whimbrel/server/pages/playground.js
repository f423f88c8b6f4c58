/** The playground: asks what is served, and opens the tabs that the served models allow. */

import { Api } from "./api.js";
import { count, h, show, target } from "./dom.js";
import { askKey } from "./key.js";
import { readModels } from "./models.js";
import { makeTabs } from "./tabs.js";
import { tab as classify } from "./tab-classify.js";
import { tab as compare } from "./tab-compare.js";
import { tab as entities } from "./tab-entities.js";
import { tab as late } from "./tab-late.js";
import { tab as request } from "./tab-request.js";
import { tab as rerank } from "./tab-rerank.js";
import { tab as sparse } from "./tab-sparse.js";
import { tab as tokens } from "./tab-tokens.js";

/**
 * The tabs, in order. A tab is {id, title, needs, fits(models), build(context)}: `fits` returns the models that it can use,
 * `needs` says what is missing if there are none, and `build` returns {node, open()}. `context` has {id, api, models, all, titles}.
 */
const TABS = [compare, late, sparse, rerank, classify, entities, tokens, request];
const TITLES = Object.fromEntries(TABS.map(({ id, title }) => [id, title]));

const status = document.getElementById("status");
const panels = document.getElementById("panels");
const keyButton = document.getElementById("key");
const api = new Api(async (wasWrong) => {
  const key = await askKey(wasWrong);
  if (key) keyButton.hidden = false;
  return key;
});

keyButton.addEventListener("click", () => api.changeKey());

async function start() {
  status.textContent = "Asking the server what it serves…";
  try {
    const { data } = await api.call("/info", undefined, { onwait: (text) => (status.textContent = text) });
    const models = readModels(data);
    if (!models.length) throw new Error("The server has no model yet.");
    describe(models, data.version);
    build(models);
    watch(models);
  } catch (error) {
    status.textContent = "";
    const action = error.kind === "key" ? "Enter the key" : "Try again";
    show(panels, h("div", { class: "notice error start", role: "alert" }, h("span", {}, error.message), h("button", { type: "button", onclick: start }, action)));
  }
}

function describe(models, version) {
  const waiting = models.filter(({ ready }) => !ready);
  const first = models.length === 1 ? models[0].name : count(models.length, "model");
  const state = waiting.length ? waiting.map((model) => (models.length > 1 ? `${model.name}: ${model.status}` : model.status)).join("; ") : "ready";
  status.className = waiting.length ? "small warn-text" : "small muted";
  show(status, h("span", { class: "served", title: models.map(({ name }) => name).join("\n") }, first), ` · ${state} · version ${version}`);
}

/** Ask again while a model is not ready. */
function watch(models) {
  if (models.every(({ ready }) => ready)) return;
  setTimeout(async () => {
    try {
      const { data } = await api.call("/info");
      const fresh = readModels(data);
      describe(fresh, data.version);
      watch(fresh);
    } catch (error) {
      status.textContent = error.message;
      if (error.kind !== "key") watch(models);
    }
  }, 2000);
}

function build(models) {
  const views = new Map();
  const tabs = TABS.map((tab) => {
    const fitting = tab.fits(models);
    return { id: tab.id, title: tab.title, reason: fitting.length ? undefined : `Needs ${tab.needs}, which this server does not serve.`, panel: h("section", { class: "panel" }), tab, fitting };
  });
  const control = makeTabs(document.getElementById("tabs"), panels, tabs, (id) => {
    const { tab, fitting, panel } = tabs.find((each) => each.id === id);
    if (!views.has(id)) {
      views.set(id, tab.build({ id, api, models: fitting, all: models, titles: TITLES }));
      panel.append(views.get(id).node);
    }
    history.replaceState(null, "", `#${id}`);
    views.get(id).open?.();
  });
  const wanted = target();
  control.start(tabs.some(({ id, reason }) => id === wanted && !reason) ? wanted : tabs.find(({ reason }) => !reason)?.id);
  window.addEventListener("hashchange", () => {
    if (target() !== control.current()) control.open(target());
  });
}

start();
