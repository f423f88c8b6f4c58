/** Map: lines as points, by the first two principal components of their vectors. A point shows its nearest neighbours. */

import { count, decimal, h, shorten, show, svg } from "./dom.js";
import { choiceField, linesField, modelField } from "./forms.js";
import { gives, hasRoles } from "./models.js";
import { project } from "./pca.js";
import { cosine, embed } from "./vectors.js";
import { workbench } from "./workbench.js";

const MAX = 1000;
const NEIGHBOURS = 10;
const WIDTH = 860;
const HEIGHT = 620;
const MARGIN = 34;
const EXAMPLE = `The whimbrel has a curved bill and a striped crown.
Curlews call over the marsh at dusk.
Sandpipers run along the edge of the waves.
Plovers nest on bare gravel.
Godwits fly from Alaska to New Zealand without a stop.
Swifts sleep while they fly.
Knead the dough until it is smooth.
Simmer the tomatoes with garlic and basil.
Pancakes need milk, eggs and flour.
Let the bread cool before you cut it.
Season the soup with salt and pepper.
Roast the potatoes until they are golden.
The pointer is used after it was freed.
A deadlock occurs when two threads wait for each other.
Use a hash table to find duplicates quickly.
The compiler warns about an unused variable.
Unit tests run on every commit.
The query is slow because the index is missing.
Heavy rain is expected in the afternoon.
A cold front brings snow to the mountains.
The wind will ease overnight.
Fog lies over the valley this morning.
It was the hottest July on record.
The goalkeeper saved a penalty in the last minute.
She won the marathon in just over two hours.
The match went to extra time.
He served three aces in a row.
The team signed a new striker this summer.`.split("\n");

function build(context) {
  const model = modelField(context.models);
  const role = choiceField("Texts are", [["document", "documents"], ["query", "queries"]]);
  role.node.hidden = !context.models.some(hasRoles);
  const lines = linesField("Texts, one a line", { lines: EXAMPLE, max: MAX, rows: 14, noun: "text" });

  async function run(call, say, signal) {
    const texts = lines.lines;
    if (texts.length < 3) throw new Error("Write at least three lines.");
    const roles = hasRoles(model.model) ? { input_type: role.value } : {};
    const vectors = await embed(call, model.name, texts, { say, ...roles });
    say(`${count(texts.length, "text")} embedded; now projecting.`);
    const projected = await project(vectors, signal);
    return draw(model.name, texts, vectors, projected);
  }

  return workbench(context, {
    intro: "Paste lines to see which belong together. Choose a point to see its nearest neighbours, by cosine.",
    fields: [h("div", { class: "row" }, model.node, role.node), lines.node],
    run,
    runLabel: "Draw",
  });
}

function draw(name, texts, vectors, { points, shares }) {
  const places = scale(points);
  const links = svg("g", { class: "links" });
  const labels = svg("g", { class: "labels", "aria-hidden": "true" });
  const dots = places.map(([x, y], index) =>
    svg("circle", {
      class: "dot", cx: x.toFixed(1), cy: y.toFixed(1), r: texts.length > 300 ? 4 : 6, role: "option", tabindex: "-1", "aria-selected": "false",
      "aria-label": shorten(texts[index], 160), data: { index, x: points[index][0], y: points[index][1] },
    }, svg("title", {}, shorten(texts[index], 300))),
  );
  const plot = svg("svg", { class: "map", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "listbox", "aria-label": "Map of the texts. Arrow keys move between points, Enter chooses one." }, links, svg("g", {}, dots), labels);
  const side = h("div", { class: "neighbours", "aria-live": "polite" });

  function choose(index) {
    const near = vectors
      .map((vector, other) => ({ other, cosine: cosine(vectors[index], vector) }))
      .filter(({ other }) => other !== index)
      .sort((a, b) => b.cosine - a.cosine)
      .slice(0, NEIGHBOURS);
    const neighbours = new Set(near.map(({ other }) => other));
    dots.forEach((dot, place) => {
      dot.classList.toggle("chosen", place === index);
      dot.classList.toggle("near", neighbours.has(place));
      dot.setAttribute("aria-selected", String(place === index));
      dot.setAttribute("tabindex", place === index ? "0" : "-1");
    });
    show(links, near.slice(0, 5).map(({ other }) => svg("line", { x1: places[index][0], y1: places[index][1], x2: places[other][0], y2: places[other][1] })));
    label(labels, places, texts, [index, ...near.slice(0, 5).map(({ other }) => other)], dots.length > 40);
    show(side,
      h("h2", {}, "Nearest to"), h("p", { class: "chosen-text" }, shorten(texts[index], 400)),
      h("ol", {}, near.map(({ other, cosine: value }) =>
        h("li", {}, h("button", { type: "button", class: "plain neighbour", data: { index: other, cosine: value }, onclick: () => choose(other) },
          h("span", { class: "number" }, decimal(value)), h("span", {}, shorten(texts[other], 200)))))),
    );
  }

  function move(event) {
    const index = dots.indexOf(document.activeElement);
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (index < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") choose(index);
    else if (way) {
      const next = towards(places, index, way);
      dots[index].setAttribute("tabindex", "-1");
      dots[next].setAttribute("tabindex", "0");
      dots[next].focus();
    } else return;
    event.preventDefault();
  }

  plot.addEventListener("keydown", move);
  plot.addEventListener("click", (event) => {
    const { index } = event.target.dataset;
    if (index !== undefined) choose(Number(index));
  });
  choose(0);
  const share = ((shares[0] + shares[1]) * 100).toFixed(0);
  return h("figure", { class: "map-figure", data: { model: name } },
    h("figcaption", {}, h("h2", {}, name), h("span", { class: "small muted" }, `${count(texts.length, "text")}; the two axes hold ${share}% of the variance, so judge by the cosines`)),
    h("div", { class: "map-layout" }, plot, side),
  );
}

/** Return places in the picture, with one scale for both axes. */
function scale(points) {
  const ranges = [0, 1].map((axis) => points.reduce(([low, high], point) => [Math.min(low, point[axis]), Math.max(high, point[axis])], [Infinity, -Infinity]));
  const [wide, tall] = ranges.map(([low, high]) => high - low || 1e-9);
  const factor = Math.min((WIDTH - 2 * MARGIN) / wide, (HEIGHT - 2 * MARGIN) / tall);
  const [left, top] = ranges.map(([low, high]) => (low + high) / 2);
  return points.map(([x, y]) => [WIDTH / 2 + (x - left) * factor, HEIGHT / 2 - (y - top) * factor]);
}

/** Return the nearest point in a direction, or the same one. */
function towards(places, index, [dx, dy]) {
  let [best, least] = [index, Infinity];
  places.forEach(([x, y], other) => {
    const along = (x - places[index][0]) * dx + (y - places[index][1]) * dy;
    const aside = Math.abs((x - places[index][0]) * dy) + Math.abs((y - places[index][1]) * dx);
    const cost = along + 2.5 * aside;
    if (other !== index && (along > 0 || (along === 0 && aside === 0 && other > index)) && cost < least) [best, least] = [other, cost];
  });
  return best;
}

/** Write texts beside points, the first ones first, where they hide no other. */
function label(group, places, texts, first, few) {
  const taken = [];
  const nodes = [];
  const others = few ? [] : places.map((_, index) => index);
  for (const index of new Set([...first, ...others])) {
    const text = shorten(texts[index], 30);
    const [x, y] = places[index];
    const width = 6.7 * text.length;
    const toLeft = x + width + 12 > WIDTH;
    const box = { left: toLeft ? x - 10 - width : x + 10, right: toLeft ? x - 10 : x + 10 + width, top: y - 9, bottom: y + 9 };
    if (taken.some((other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom)) continue;
    taken.push(box);
    nodes.push(svg("text", { class: index === first[0] ? "chosen" : first.includes(index) ? "near" : "", x: toLeft ? x - 10 : x + 10, y: y + 4.5, "text-anchor": toLeft ? "end" : "start" }, text));
  }
  show(group, nodes);
}

export const tab = { id: "map", title: "Map", needs: "a model with dense vectors", fits: (models) => models.filter((model) => gives(model, "dense")), build };
