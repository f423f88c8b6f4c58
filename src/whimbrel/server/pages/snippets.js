/** Code that repeats a call as curl, Python or JavaScript, and the calls that the API's description has as examples. The key is a variable. */

const SHELL_LIMIT = 100_000; // bytes of one argument of a command; Linux takes 131,072
const WIDTH = 96;
const VARIABLE = "WHIMBREL_API_KEY";

/** Return the calls of the examples in /openapi.json by API: {API: [{method, path, body, about}]}. `model` is put where a body may name one. */
export function examplesOf(document, model) {
  const found = Object.fromEntries(document.tags.map(({ name }) => [name, []]));
  for (const [path, { post }] of Object.entries(document.paths)) {
    if (!post) continue;
    const { examples } = post.requestBody.content["application/json"];
    const calls = Object.entries(examples).map(([about, { value }]) => ({ method: "POST", path, body: { model, ...value }, about }));
    for (const api of post.tags) found[api].push(...calls);
  }
  return Object.fromEntries(Object.entries(found).filter(([, calls]) => calls.length));
}

/** Return a call {method, path, body} in each language, as {id, title, code}. `base` is the server's URL, `withKey` whether it asks for a key. */
export function snippetsOf(call, { base, withKey }) {
  const to = { base: base.replace(/\/$/, ""), withKey };
  return [
    { id: "curl", title: "curl", code: curl(call, to) },
    { id: "python", title: "Python (requests)", code: python(call, to) },
    { id: "javascript", title: "JavaScript (fetch)", code: javascript(call, to) },
  ];
}

function curl({ path, body }, { base, withKey }) {
  const key = withKey ? ` \\\n  -H "Authorization: Bearer $${VARIABLE}"` : "";
  if (body === undefined) return `curl ${shellQuoted(base + path)}${key}`;
  const json = literal(body, JSON_STYLE, 2);
  const head = `curl ${shellQuoted(base + path)} -H 'Content-Type: application/json'${key} \\\n  `;
  return new TextEncoder().encode(json).length > SHELL_LIMIT ? `${head}--data-binary @- <<'JSON'\n${json}\nJSON` : `${head}-d ${shellQuoted(json)}`;
}

/** Return a text as one word of a POSIX shell. */
function shellQuoted(text) {
  return /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

function python({ path, body }, { base, withKey }) {
  const imports = withKey ? "import os\n\nimport requests" : "import requests";
  const key = withKey ? `\n    headers={"Authorization": f"Bearer {os.environ['${VARIABLE}']}"},` : "";
  const content = body === undefined ? "" : `\n    json=${literal(body, PYTHON, 4)},`;
  return `${imports}\n\nanswer = requests.${body === undefined ? "get" : "post"}(\n    ${literal(base + path, PYTHON)},${key}${content}\n)\nanswer.raise_for_status()\nprint(answer.json())`;
}

function javascript({ path, body }, { base, withKey }) {
  const type = body === undefined ? [] : ['"Content-Type": "application/json"'];
  const key = withKey ? [`Authorization: \`Bearer \${process.env.${VARIABLE}}\``] : [];
  const fields = [...type, ...key].join(", ");
  const content = body === undefined ? "" : `\n  body: JSON.stringify(${literal(body, JAVASCRIPT, 2)}),`;
  const options = `{\n  method: "${body === undefined ? "GET" : "POST"}",${fields && `\n  headers: { ${fields} },`}${content}\n}`;
  return `const answer = await fetch(${literal(base + path, JAVASCRIPT)}, ${options});\nif (!answer.ok) throw new Error(await answer.text());\nconsole.log(await answer.json());`;
}

const JSON_STYLE = { step: 2, spaced: false, lastComma: "" };
const PYTHON = { true: "True", false: "False", null: "None", step: 4, spaced: false, lastComma: "," };
const JAVASCRIPT = { true: "true", false: "false", null: "null", step: 2, spaced: true, lastComma: "," };

/** Return a JSON value as a literal of a language, over several lines where it is long. `indent` is that of its last line. */
function literal(value, style, indent = 0) {
  const flat = flatLiteral(value, style);
  if (flat.length + indent <= WIDTH || value === null || typeof value !== "object") return flat;
  const inner = indent + style.step;
  const pad = "\n" + " ".repeat(inner);
  const parts = Array.isArray(value)
    ? value.map((each) => literal(each, style, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, style, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}${parts.map((part) => pad + part).join(",")}${style.lastComma}\n${" ".repeat(indent)}${close}`;
}

function flatLiteral(value, style) {
  if (Array.isArray(value)) return `[${value.map((each) => flatLiteral(each, style)).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const fields = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${flatLiteral(each, style)}`).join(", ");
    return style.spaced && fields ? `{ ${fields} }` : `{${fields}}`;
  }
  return typeof value === "string" ? JSON.stringify(value) : (style[String(value)] ?? String(value));
}
