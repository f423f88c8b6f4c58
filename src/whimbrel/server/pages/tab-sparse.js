/** Sparse: the words of texts by weight, those that a text does not contain, and the words that a query hits. */

import { bar, cutNotice, scoredBy } from "./bars.js";
import { count, decimal, h, shorten } from "./dom.js";
import { linesField, modelField, textField } from "./forms.js";
import { gives } from "./models.js";
import { workbench } from "./workbench.js";

const QUERY = "winter birds";
const TEXTS = ["Swallows fly to Africa in autumn.", "The cold season is hard for small animals."];
const MAX_TEXTS = 12;
const SHOWN = 16; // words of a text, by weight
const SHOWN_HITS = 8;
const SHOWN_OF_QUERY = 12;
const NAMED = 400; // words whose names are asked for

function build(context) {
  const chosen = modelField(context.models);
  const query = textField("Query (may be empty)", { text: QUERY });
  const texts = linesField("Texts, one a line", { lines: TEXTS, max: MAX_TEXTS, rows: 6, noun: "text" });

  async function run(call) {
    const { model, name } = chosen;
    const asked = query.text.trim();
    const lines = texts.lines;
    if (!lines.length) throw new Error("Write at least one text.");
    const found = await sparse(call, name, lines, "document");
    const [own] = asked ? (await sparse(call, name, [asked], "query")).entries : [];
    const entries = [...found.entries, ...(own ? [own] : [])];
    const present = await tokensOf(call, name, own ? [...lines, asked] : lines);
    const hits = found.entries.map((entry) => (own ? hitsOf(own, entry) : []));
    const words = await namesOf(call, name, entries, hits);
    const scores = own ? await scoresOf(call, model, name, asked, lines) : [];
    const max = Math.max(0.01, ...entries.flatMap(({ weights }) => Array.from(weights)).slice(0, 100_000));
    const shown = { words, max };
    return [
      cutNotice(found, model),
      h("p", { class: "small muted keys" }, key("", "in the text"), key("added", "added by the model"), own && key("hit", "hit by the query")),
      own && strip(own, present.at(-1), words),
      h("div", { class: "cards" },
        lines.map((line, place) => figure(line, found.entries[place], present[place], { ...shown, hits: hits[place], score: scores[place], place })),
      ),
    ];
  }

  return workbench(context, {
    intro: "A sparse model weighs words of its vocabulary, also words that a text does not contain. A query finds the texts that share its words.",
    fields: [chosen.node, query.node, texts.node],
    run,
    runLabel: "Weigh",
  });
}

function key(kind, text) {
  return h("span", { class: `key ${kind}` }, h("span", { class: "bar-fill", "aria-hidden": "true" }), text);
}

/** Return {entries, headers}: ids and weights of each text, by falling weight. */
async function sparse(call, model, input, type) {
  const { data, headers } = await call("/v1/embed", { model, input, outputs: ["sparse"], input_type: type });
  const entries = data.outputs.sparse.map(({ ids, weights }) => {
    const order = ids.map((_, place) => place).sort((left, right) => weights[right] - weights[left] || ids[left] - ids[right]);
    return { ids: order.map((place) => ids[place]), weights: order.map((place) => weights[place]) };
  });
  return { entries, headers };
}

/** Return the ids of the tokens of each text. */
async function tokensOf(call, model, inputs) {
  const { data } = await call("/tokenize", { model, inputs });
  return data.map((tokens) => new Set(tokens.map(({ id }) => id)));
}

/** Return the words that two entries share, as {id, left, right, product}, by falling product. */
function hitsOf(query, text) {
  const weights = new Map(text.ids.map((id, place) => [id, text.weights[place]]));
  return query.ids
    .map((id, place) => ({ id, left: query.weights[place], right: weights.get(id) }))
    .filter(({ right }) => right !== undefined)
    .map((hit) => ({ ...hit, product: hit.left * hit.right }))
    .sort((left, right) => right.product - left.product);
}

/** Return a map from ids to words, of the heaviest entries and of all hits. */
async function namesOf(call, model, entries, hits) {
  const wanted = new Set(hits.flat().map(({ id }) => id));
  const each = Math.ceil(NAMED / entries.length);
  for (const { ids } of entries) for (const id of ids.slice(0, Math.max(SHOWN, each))) wanted.add(id);
  const ids = [...wanted];
  if (!ids.length) return new Map();
  const { data } = await call("/decode", { model, ids: ids.map((id) => [id]), skip_special_tokens: false });
  return new Map(ids.map((id, place) => [id, data[place].trim() || "␣"]));
}

async function scoresOf(call, model, name, queries, documents) {
  const { data } = await call("/v1/score", { model: name, queries, documents, ...scoredBy(model, "sparse") });
  const scores = [];
  for (const { index, score } of data.data) scores[index] = score;
  return scores;
}

/** Return the query's words in one line. */
function strip({ ids, weights }, present, words) {
  const shown = ids.slice(0, SHOWN_OF_QUERY);
  const items = shown.map((id, row) => h("li", { class: present.has(id) ? "weighed" : "weighed added", data: { id, value: weights[row] } },
    words.get(id), !present.has(id) && h("span", { class: "visually-hidden" }, " (added by the model)"), h("span", { class: "number" }, decimal(weights[row], 2))));
  const rest = ids.length - shown.length;
  return h("section", { class: "query-tokens", "aria-label": "Words of the query" },
    h("h2", {}, "Query"), h("ul", { class: "strip" }, items, rest > 0 && h("li", { class: "small muted" }, `and ${rest} more`)));
}

function figure(text, { ids, weights }, present, { words, max, hits, score, place }) {
  const hit = new Set(hits.map(({ id }) => id));
  const added = ids.filter((id) => !present.has(id)).length;
  const items = ids.slice(0, NAMED).flatMap((id, row) => {
    if (!words.has(id)) return [];
    const own = present.has(id);
    const kind = `${own ? "" : "added"} ${hit.has(id) ? "hit" : ""}`;
    const note = [!own && "added by the model", hit.has(id) && "hit by the query"].filter(Boolean).join(", ");
    return [bar({ label: words.get(id), value: weights[row], max, kind, note, data: { id } })];
  });
  const rest = items.slice(SHOWN);
  return h("figure", { class: "card", data: { text: place, score } },
    h("figcaption", {}, h("h3", {}, shorten(text, 200)),
      score !== undefined && h("span", { class: "score number" }, decimal(score))),
    h("p", { class: "small muted" }, `${count(ids.length, "word")}, ${added} of them added.`),
    score !== undefined && sums(hits, words, score),
    h("ul", { class: "bars" }, items.slice(0, SHOWN)),
    rest.length > 0 && h("details", {}, h("summary", { class: "small" }, ids.length > items.length ? `Next ${rest.length} words` : `${count(rest.length, "more word")}`), h("ul", { class: "bars" }, rest)),
  );
}

function sums(hits, words, score) {
  if (!hits.length) return h("p", { class: "small hits" }, "The query hits no word of this text.");
  const total = hits.reduce((sum, { product }) => sum + product, 0);
  return h("table", { class: "hits number", data: { total } },
    h("thead", {}, h("tr", {}, ["Hit", "query", "text", "product"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, hits.slice(0, SHOWN_HITS).map(({ id, left, right, product }) =>
      h("tr", { data: { id, product } }, h("th", { scope: "row" }, words.get(id)), [`${decimal(left)} ×`, `${decimal(right)} =`, decimal(product)].map((cell) => h("td", {}, cell))))),
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row", colspan: 3 }, hits.length > SHOWN_HITS ? `Sum of all ${hits.length} hits` : "Sum"), h("td", { data: { score } }, decimal(total)))),
  );
}

export const tab = { id: "sparse", title: "Sparse", needs: "a sparse model, such as SPLADE", fits: (models) => models.filter((model) => gives(model, "sparse")), build };
