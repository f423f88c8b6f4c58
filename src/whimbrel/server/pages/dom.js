/** Elements made of names, properties and text. No function here takes HTML. */

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "css") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, String(part));
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return an element: `h("p", {class: "muted", data: {score: 0.5}, onclick: f}, "text", node, [more])`. `css` sets CSS properties. */
export function h(name, properties, ...children) {
  return fill(document.createElement(name), properties, children);
}

/** Return an SVG element, as `h` does. */
export function svg(name, properties, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

/** Replace all children of a node. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return the id that the address names after its #, "" if none. */
export function target() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // a % that begins no character
  }
}

let last = 0;

/** Return an id that no other element has. */
export function newId(prefix = "id") {
  last += 1;
  return `${prefix}-${last}`;
}

const counts = new Intl.NumberFormat("en");

/** Return a count with its noun: "1 line", "1,200 lines". */
export function count(number, noun, nouns = `${noun}s`) {
  return `${counts.format(number)} ${number === 1 ? noun : nouns}`;
}

/** Return a number with a fixed number of decimals and a true minus sign. */
export function decimal(value, digits = 3) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "\u2212");
}

/** Return a text of at most `limit` characters, with an ellipsis where it was cut. */
export function shorten(text, limit = 60) {
  const characters = text.length > 2 * limit ? Array.from(text.slice(0, 2 * limit)) : Array.from(text);
  return characters.length > limit || text.length > 2 * limit ? `${characters.slice(0, limit - 1).join("").trimEnd()}…` : text;
}

/** Copy a text, and return whether the browser allowed it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // pages of http: have no clipboard, but for localhost
    const before = document.activeElement;
    const area = h("textarea", { value: text, class: "visually-hidden" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before.focus();
    return done;
  }
}

/** Let the browser paint and handle events. Call it between slices of long work. */
export function breathe() {
  return new Promise((resolve) => setTimeout(resolve, 0));
}
