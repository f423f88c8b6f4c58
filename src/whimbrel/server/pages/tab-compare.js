/** Compare: the cosine of each query with each text, of one model or two side by side. */

import { count, decimal, h, shorten } from "./dom.js";
import { linesField, modelField } from "./forms.js";
import { heat, legend, rangeOf } from "./heat.js";
import { gives, hasRoles } from "./models.js";
import { cosine, embed } from "./vectors.js";
import { workbench } from "./workbench.js";

const QUERIES = ["Which bird flies from the Arctic to Africa?", "What can I cook with eggs and flour?", "My program stops with an error"];
const TEXTS = [
  "Whimbrels breed in the north and winter on the coasts of Africa.",
  "The curlew's long bill reaches worms deep in the mud.",
  "Pancakes need little more than milk, eggs and flour.",
  "Fresh pasta dries in an hour and cooks in two minutes.",
  "Segmentation fault: the pointer is used after it was freed.",
  "Add a null check before you read the field.",
];

function build(context) {
  const first = modelField(context.models);
  const second = modelField(context.models, { label: "Beside", none: "no second model" });
  const queries = linesField("Queries, one a line", { lines: QUERIES, max: 20, rows: 4, noun: "query", nouns: "queries" });
  const texts = linesField("Texts, one a line", { lines: TEXTS, max: 200, rows: 9, noun: "text" });

  async function run(call, say) {
    const asked = { queries: queries.lines, texts: texts.lines };
    if (!asked.queries.length || !asked.texts.length) throw new Error("Write at least one query and one text.");
    const chosen = [first, second].filter((field) => field.name && (field === first || field.name !== first.name));
    const grids = [];
    for (const field of chosen) grids.push(await compare(call, say, field, asked));
    return h("div", { class: "grids" }, grids);
  }

  return workbench(context, {
    intro: "How near each text is to each query, as the cosine of their vectors.",
    fields: [h("div", { class: "row" }, first.node, second.node), queries.node, texts.node],
    run,
    runLabel: "Compare",
  });
}

async function compare(call, say, { name, model }, { queries, texts }) {
  const roles = hasRoles(model);
  const left = await embed(call, name, queries, { say, ...(roles && { input_type: "query" }) });
  const right = await embed(call, name, texts, { say, ...(roles && { input_type: "document" }) });
  const cosines = right.map((text) => left.map((query) => cosine(query, text)));
  return grid(name, queries, texts, cosines, left[0].length);
}

function grid(name, queries, texts, cosines, width) {
  const range = rangeOf(cosines.flat());
  const best = queries.map((_, column) => Math.max(...cosines.map((row) => row[column])));
  const head = h("tr", {}, h("th", { scope: "col" }, "Text"), queries.map((query) => h("th", { scope: "col", class: "query", title: query }, h("span", {}, shorten(query, 60)))));
  const rows = texts.map((text, row) =>
    h("tr", {}, h("th", { scope: "row", class: "text" }, shorten(text, 160)), cosines[row].map((value, column) => {
      const top = value === best[column] && texts.length > 1;
      const label = top ? [decimal(value), h("span", { class: "visually-hidden" }, " (nearest)")] : decimal(value);
      return heat(h("td", { class: top ? "best" : "", data: { cosine: value } }, label), value, range);
    })),
  );
  return h("figure", { class: "grid-figure", data: { model: name } },
    h("figcaption", {}, h("h2", {}, name), h("span", { class: "small muted" }, `${count(width, "column")}; the nearest text of each query is framed`), legend(range)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Cosines of ${name}` }, h("table", { class: "heat-table" }, h("thead", {}, head), h("tbody", {}, rows))),
  );
}

export const tab = { id: "compare", title: "Compare", needs: "a model with dense vectors", fits: (models) => models.filter((model) => gives(model, "dense")), build };
