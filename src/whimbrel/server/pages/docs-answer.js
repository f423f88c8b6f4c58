/** Answers of any route as text: JSON with long lists cut, binary answers by size and first numbers. */

import { copy, count, h, show } from "./dom.js";

const HEADERS = ["content-type", "x-whimbrel-tokens", "x-whimbrel-truncated", "server-timing", "metadata", "x-request-id", "retry-after"];
const LIST = 8; // numbers or texts of a list that are shown
const ROWS = 20; // lists or objects of a list that are shown
const TEXT = 400; // characters of a text in JSON
const PLAIN = 6000; // characters of an answer that is no JSON
const PARSED = 32 * 1024 * 1024; // bytes of JSON that are read
const NUMBERS = 8;

/** Show an answer: {response, bytes, ms, dtype}. */
export function showAnswer(node, { response, bytes, ms, dtype }) {
  const kind = (response.headers.get("content-type") ?? "").split(";")[0];
  const { text, cut } = preview(kind, bytes, dtype);
  const named = HEADERS.filter((name) => response.headers.has(name));
  show(
    node,
    h("div", { class: "told" },
      h("b", { class: response.ok ? "status" : "status bad", data: { status: response.status } }, `${response.status} ${response.statusText}`.trim()),
      h("span", {}, `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`),
      h("span", {}, size(bytes.length)),
      h("dl", {}, named.map((name) => h("div", {}, h("dt", {}, name), h("dd", {}, response.headers.get(name)))))),
    h("pre", { tabindex: "0", "aria-label": "Answer" }, text),
    h("div", { class: "command" }, cut ? "Shortened here." : "All of the answer.", isText(kind) && copyButton(() => decode(bytes), "Copy all of it")),
  );
}

/** Return a button that copies what `text` returns. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "plain" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

const decode = (bytes) => new TextDecoder().decode(bytes);
const isText = (kind) => kind === "application/json" || kind.startsWith("text/") || kind === "application/openmetrics-text";

function size(bytes) {
  return bytes < 1024 ? count(bytes, "byte") : bytes < 1024 * 1024 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1024 / 1024).toFixed(1)} MiB`;
}

function preview(kind, bytes, dtype) {
  if (!isText(kind)) return { text: bytes.length ? numbers(kind, bytes, dtype) : "No body.", cut: bytes.length > 0 };
  if (kind === "application/json" && bytes.length <= PARSED) {
    try {
      const state = { cut: false };
      return { text: json(JSON.parse(decode(bytes)), "", state), cut: state.cut };
    } catch {
      // several documents, or no JSON after all
    }
  }
  const text = decode(bytes.subarray(0, 4 * PLAIN));
  return { text: text.slice(0, PLAIN), cut: text.length > PLAIN || bytes.length > 4 * PLAIN };
}

/** Return JSON with an indent, in which long lists and texts are cut; `state.cut` tells whether any was. */
function json(value, indent, state) {
  if (typeof value === "string" && value.length > TEXT) {
    state.cut = true;
    return `${JSON.stringify(value.slice(0, TEXT))}… ${count(value.length - TEXT, "character")} more`;
  }
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}  `;
  if (!Array.isArray(value)) {
    const parts = Object.entries(value).map(([name, each]) => `${deeper}${JSON.stringify(name)}: ${json(each, deeper, state)}`);
    return parts.length ? `{\n${parts.join(",\n")}\n${indent}}` : "{}";
  }
  const flat = value.every((each) => each === null || typeof each !== "object");
  const limit = flat ? LIST : ROWS;
  const parts = value.slice(0, limit).map((each) => json(each, deeper, state));
  if (value.length > limit) {
    state.cut = true;
    parts.push(`… ${(value.length - limit).toLocaleString("en")} more`);
  }
  if (!parts.length) return "[]";
  return flat && parts.join("").length < 200 ? `[${parts.join(", ")}]` : `[\n${deeper}${parts.join(`,\n${deeper}`)}\n${indent}]`;
}

function numbers(kind, bytes, dtype) {
  const start = kind === "application/x-npy" || decode(bytes.subarray(1, 6)) === "NUMPY" ? npy(bytes) : { at: 0, type: dtype, note: "" };
  const rest = bytes.subarray(start.at);
  const lines = [`${count(bytes.length, "byte")} of ${kind}.`, start.note];
  if (start.type === "float32" && !kind.includes("arrow")) {
    const view = new DataView(rest.buffer, rest.byteOffset, rest.byteLength);
    const first = Array.from({ length: Math.min(NUMBERS, Math.floor(rest.length / 4)) }, (_, i) => Number(view.getFloat32(4 * i, true).toPrecision(8)));
    lines.push(`First numbers, as little-endian float32: ${first.join(", ")} …`);
  } else {
    lines.push(`First bytes: ${Array.from(rest.subarray(0, 32), (byte) => byte.toString(16).padStart(2, "0")).join(" ")} …`);
  }
  return lines.filter(Boolean).join("\n");
}

/** Read the head of a .npy file: where its numbers begin, and their type. */
function npy(bytes) {
  const length = bytes[6] === 1 ? bytes[8] + 256 * bytes[9] : new DataView(bytes.buffer, bytes.byteOffset).getUint32(8, true);
  const at = (bytes[6] === 1 ? 10 : 12) + length;
  const note = decode(bytes.subarray(bytes[6] === 1 ? 10 : 12, at)).trim();
  return { at, type: note.includes("'<f4'") ? "float32" : "other", note };
}
