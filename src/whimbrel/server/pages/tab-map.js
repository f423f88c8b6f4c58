/** Map: lines as points, by the first two principal components of their vectors. A point shows its nearest neighbours. */

import { count, decimal, h, shorten, show, svg } from "./dom.js";
import { choiceField, linesField, modelField } from "./forms.js";
import { gives, hasRoles } from "./models.js";
import { project } from "./pca.js";
import { cosine, embed } from "./vectors.js";
import { workbench } from "./workbench.js";

const MAX = 1000;
const NEIGHBOURS = 10;
const LINKED = 5;
const MARGIN = 30;
const LABELLED = 60; // texts of which all have labels, where there is room
const EXAMPLE = `Whimbrels and curlews are wading birds with curved bills.
Many birds fly south in autumn and return in spring.
Godwits fly from Alaska to New Zealand without a stop.
Gulls nest on the cliffs by the sea.
The owl hunts mice at night.
Sandpipers are small birds that run along the waves.
Knead the dough until it is smooth.
Simmer the tomatoes with garlic and basil.
Pancakes need milk, eggs and flour.
Let the bread cool before you cut it.
Season the soup with salt and pepper.
Roast the potatoes until they are golden.
The program crashes because of a null pointer.
A deadlock occurs when two threads wait for each other.
Use a hash table to find duplicates in the list.
The compiler warns about an unused variable.
Our unit tests run on every commit.
The database query is slow without an index.
Heavy rain is expected in the afternoon.
A cold front brings snow to the mountains.
The wind will ease and the night will be cold.
It will be sunny and warm at the weekend.
Fog and drizzle in the morning, then cloudy.
The storm brings hail and strong wind.`.split("\n");

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
  let places = points;
  let chosen = 0;
  let near = [];
  const links = svg("g", { class: "links" });
  const labels = svg("g", { class: "labels", "aria-hidden": "true" });
  const dots = points.map((_, index) =>
    svg("circle", {
      class: "dot", r: texts.length > 300 ? 4 : 6, role: "option", tabindex: "-1", "aria-selected": "false",
      "aria-label": shorten(texts[index], 160), data: { index, x: points[index][0], y: points[index][1] },
    }, svg("title", {}, shorten(texts[index], 300))),
  );
  const plot = svg("svg", { class: "map", role: "listbox", "aria-label": "Map of the texts. Arrow keys move between points, Enter chooses one." }, links, svg("g", {}, dots), labels);
  const side = h("div", { class: "neighbours", "aria-live": "polite" });

  function choose(index) {
    chosen = index;
    near = vectors
      .map((vector, other) => ({ other, cosine: cosine(vectors[index], vector) }))
      .filter(({ other }) => other !== index)
      .sort((a, b) => b.cosine - a.cosine)
      .slice(0, NEIGHBOURS);
    const neighbours = new Set(near.slice(0, LINKED).map(({ other }) => other));
    dots.forEach((dot, place) => {
      dot.classList.toggle("chosen", place === index);
      dot.classList.toggle("near", neighbours.has(place));
      dot.setAttribute("aria-selected", String(place === index));
      dot.setAttribute("tabindex", place === index ? "0" : "-1");
    });
    annotate();
    show(side,
      h("h2", {}, "Nearest to"), h("p", { class: "chosen-text" }, shorten(texts[index], 400)),
      h("ol", {}, near.map(({ other, cosine: value }) =>
        h("li", {}, h("button", { type: "button", class: "plain neighbour", data: { index: other, cosine: value }, onclick: () => choose(other) },
          h("span", { class: "number" }, decimal(value)), h("span", {}, shorten(texts[other], 200)))))),
    );
  }

  /** Draw lines to the nearest points, and labels. */
  function annotate() {
    const linked = near.slice(0, LINKED).map(({ other }) => other);
    show(links, linked.map((other) => svg("line", { x1: places[chosen][0], y1: places[chosen][1], x2: places[other][0], y2: places[other][1] })));
    const rest = texts.length > LABELLED ? [] : texts.map((_, index) => index);
    label(labels, places, texts, [...new Set([chosen, ...linked, ...rest])], 1 + linked.length, plot.viewBox.baseVal.width);
  }

  function lay({ width }) {
    const height = Math.round(Math.min(640, Math.max(340, width * 0.72)));
    plot.setAttribute("viewBox", `0 0 ${Math.round(width)} ${height}`);
    places = scale(points, width, height);
    dots.forEach((dot, index) => {
      dot.setAttribute("cx", places[index][0].toFixed(1));
      dot.setAttribute("cy", places[index][1].toFixed(1));
    });
    annotate();
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
  plot.setAttribute("viewBox", "0 0 800 560");
  choose(0);
  new ResizeObserver(([entry]) => entry.contentRect.width > 0 && lay(entry.contentRect)).observe(plot);
  const share = ((shares[0] + shares[1]) * 100).toFixed(0);
  return h("figure", { class: "map-figure", data: { model: name } },
    h("figcaption", {}, h("h2", {}, name), h("span", { class: "small muted" }, `${count(texts.length, "text")}; the two axes hold ${share}% of the variance, so judge by the cosines`)),
    h("div", { class: "map-layout" }, plot, side),
  );
}

/** Return places in the picture, with one scale for both axes. */
function scale(points, width, height) {
  const ranges = [0, 1].map((axis) => points.reduce(([low, high], point) => [Math.min(low, point[axis]), Math.max(high, point[axis])], [Infinity, -Infinity]));
  const [wide, tall] = ranges.map(([low, high]) => high - low || 1e-9);
  const factor = Math.min((width - 2 * MARGIN) / wide, (height - 2 * MARGIN) / tall);
  const [left, top] = ranges.map(([low, high]) => (low + high) / 2);
  return points.map(([x, y]) => [width / 2 + (x - left) * factor, height / 2 - (y - top) * factor]);
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

const pen = document.createElement("canvas").getContext("2d");

/** Write texts beside their points, in the order of `order`, where they hide no other. The first `strong` are emphasised. */
function label(group, places, texts, order, strong, room) {
  const dots = places.map(([x, y]) => ({ left: x - 6, right: x + 6, top: y - 6, bottom: y + 6 }));
  const taken = [];
  const nodes = [];
  pen.font = getComputedStyle(group).font;
  order.forEach((index, rank) => {
    const text = shorten(texts[index], 34);
    const [x, y] = places[index];
    const width = pen.measureText(text).width * (rank === 0 ? 1.08 : 1);
    for (const toLeft of [false, true]) {
      const left = toLeft ? x - 10 - width : x + 10;
      const box = { left, right: left + width, top: y - 8, bottom: y + 8 };
      const hides = (rank === 0 ? taken : [...taken, ...dots]).some((other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom);
      if (hides || box.left < 2 || box.right > room - 2) continue;
      taken.push(box);
      nodes.push(svg("text", { class: rank === 0 ? "chosen" : rank < strong ? "near" : "", x: left, y: y + 4.5 }, text));
      break;
    }
  });
  show(group, nodes);
}

export const tab = { id: "map", title: "Map", needs: "a model with dense vectors", fits: (models) => models.filter((model) => gives(model, "dense")), build };
