/** The API reference: search, and links to folded parts. */

import { count, h, newId, show, target as named } from "./dom.js";

const NARROW = matchMedia("(max-width: 820px)");
const HITS = 8; // names of fields that a route shows as found

const routes = [...document.querySelectorAll("details.route")];
const toc = document.querySelector(".toc");
const links = new Map([...toc.querySelectorAll("a")].map((link) => [link, link.hash.slice(1)]));

// Folded parts

/** Open what contains the target of the address, and scroll to it. */
function reveal() {
  const id = named();
  const target = id && document.getElementById(id);
  if (!target) return;
  for (let node = target; node; node = node.parentElement) if (node.matches("details")) node.open = true;
  target.scrollIntoView();
  mark(id);
}

/** Mark the target in the contents. */
function mark(id) {
  const route = id.split(".")[0];
  for (const [link, target] of links) link[target === route ? "setAttribute" : "removeAttribute"]("aria-current", "true");
  const current = [...links].find(([, target]) => target === route)?.[0];
  if (current && !NARROW.matches) current.scrollIntoView({ block: "nearest" });
}

for (const route of routes) {
  route.querySelector("summary").addEventListener("click", () => {
    if (route.open) return; // it is about to close
    history.replaceState(null, "", `#${route.id}`);
    mark(route.id);
  });
}
toc.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  if (NARROW.matches) toc.open = false;
  if (link.hash === location.hash) setTimeout(reveal); // no hashchange comes
});
window.addEventListener("hashchange", reveal);
const fold = () => (toc.open = !NARROW.matches);
NARROW.addEventListener("change", fold);
fold();

// Search

const entries = routes.map((route) => ({
  route,
  text: [route.closest("section").querySelector("h2").textContent, route.querySelector("summary").textContent, ...[...route.querySelectorAll(".body > p")].map((p) => p.textContent)].join(" ").toLowerCase(),
  links: [...links].filter(([, id]) => id === route.id).map(([link]) => link.parentElement),
  fields: [...route.querySelectorAll("tr[id]")].map((row) => ({ row, name: row.cells[0].querySelector("code").textContent, text: row.textContent.toLowerCase() })),
  hits: h("p", { class: "hits", hidden: true }),
}));
for (const { route, hits } of entries) route.querySelector("summary").after(hits);

const box = h("input", { type: "search", id: newId("search"), autocomplete: "off", spellcheck: "false", placeholder: "Path, field or word", "aria-keyshortcuts": "/" });
const found = h("p", { class: "found small muted", role: "status" });
const none = h("p", { class: "notice", hidden: true }, h("span", {}, "No route and no field has these words."), h("button", { type: "button", onclick: () => search("") }, "Clear the search"));

/** Show the routes that have all words, in their own texts or in a field. */
function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (text) => words.every((word) => text.includes(word));
  let total = 0;
  for (const { route, text, links: items, fields, hits } of entries) {
    const rows = words.length ? fields.filter((field) => has(`${field.text} ${text}`) && words.some((word) => field.text.includes(word))) : [];
    const matches = has(text) || rows.length > 0;
    total += matches;
    route.hidden = !matches;
    for (const item of items) item.hidden = !matches;
    for (const { row } of fields) row.classList.remove("hit");
    for (const { row } of rows) row.classList.add("hit");
    hits.hidden = rows.length === 0;
    const named = rows.slice(0, HITS).map(({ row, name }) => h("a", { href: `#${row.id}` }, name));
    show(hits, "Fields:", named, rows.length > HITS ? ` and ${rows.length - HITS} more` : "");
  }
  for (const part of document.querySelectorAll("main > section")) {
    part.hidden = [...part.querySelectorAll(".route")].every((route) => route.hidden);
    const [link] = [...links].find(([, id]) => id === part.getAttribute("aria-labelledby"));
    link.parentElement.hidden = part.hidden;
    part.querySelector(".errors")?.toggleAttribute("hidden", words.length > 0);
  }
  none.hidden = total > 0;
  found.textContent = words.length ? `${count(total, "route")} of ${routes.length}` : count(total, "route");
}

function search(text) {
  box.value = text;
  filter();
  box.focus();
}

box.addEventListener("input", filter);
box.addEventListener("keydown", (event) => {
  if (event.key === "Escape") search("");
  if (event.key !== "Enter") return;
  const first = entries.find(({ route }) => !route.hidden);
  if (!first) return;
  const target = first.hits.querySelector("a")?.hash ?? `#${first.route.id}`;
  if (target === location.hash) reveal();
  else location.hash = target;
  first.route.querySelector("summary").focus({ preventScroll: true });
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  box.focus();
  box.select();
});

const all = h("button", { type: "button", onclick: () => foldAll(all.textContent === "Open all") }, "Open all");
function foldAll(open) {
  for (const route of routes) if (!route.hidden) route.open = open;
  all.textContent = open ? "Close all" : "Open all";
}

show(document.getElementById("search"), h("label", { for: box.id }, "Search", h("kbd", { "aria-hidden": "true" }, "/")), box);
show(document.getElementById("tools"), none, found, all);
filter();
reveal();
