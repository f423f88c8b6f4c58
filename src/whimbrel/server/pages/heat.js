/** Heat colours: one hue from the background upwards, a second one below zero. Numbers stay legible on them. */

import { decimal, h } from "./dom.js";

/** Return the range {low, high} of numbers. */
export function rangeOf(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return { low, high };
}

/** Colour an element by a value's place in a range. */
export function heat(node, value, { low, high }) {
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5;
  node.classList.add("heat");
  node.classList.toggle("warm", share > 0.58); // where numbers change their colour: in the dark scheme here, in the light one below
  node.classList.toggle("hot", share > 0.69);
  node.style.setProperty("--heat", `${(share * 100).toFixed(1)}%`);
  return node;
}

/** Return the legend of a range. */
export function legend({ low, high }, digits = 2) {
  return h("div", { class: "legend small muted number" }, decimal(low, digits), h("span", { class: "ramp" }), decimal(high, digits));
}
