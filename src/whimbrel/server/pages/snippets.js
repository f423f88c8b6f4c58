/** Code that repeats a call: in the words of any API that has them, as curl, Python or JavaScript. The key is a variable. */

const SHELL_LIMIT = 100_000; // characters of one argument of a command
const WIDTH = 96;
const VARIABLE = "WHIMBREL_API_KEY";

/** Return what a call asks for, whichever API it used: {verb, model, ...}, or null where only the call itself says it. */
export function intentOf({ path, body }) {
  const { model } = body ?? {};
  const prompted = { role: body?.input_type, prompt: body?.prompt, promptName: body?.prompt_name };
  switch (path) {
    case "/v1/embeddings":
      return { verb: "embed", model, texts: listOf(body.input), dimensions: body.dimensions, ...prompted };
    case "/v1/embed": {
      const outputs = listOf(body.outputs ?? []);
      const plain = body.max_tokens === undefined && outputs.length === 1;
      const verb = { dense: "embed", sparse: "sparse", multi_vector: "multiVector" }[outputs[0]];
      return plain && verb ? { verb, model, texts: listOf(body.input), ...prompted } : null;
    }
    case "/v1/rerank":
      return { verb: "rerank", model, query: body.query, documents: body.documents, topN: body.top_n, explain: body.explain === true };
    case "/v1/score":
      return { verb: "score", model, query: body.queries, documents: listOf(body.documents), explain: body.explain === true };
    case "/v1/classify":
      return { verb: "classify", model, texts: listOf(body.input) };
    case "/v1/token_classify":
      return { verb: "entities", model, texts: listOf(body.input), aggregation: body.aggregation };
    case "/tokenize":
      return { verb: "tokenize", model, texts: listOf(body.inputs ?? body.prompt), promptName: body.prompt_name };
    default:
      return null;
  }
}

function listOf(value) {
  return Array.isArray(value) ? value : [value];
}

/** Return an object without the fields that are undefined. */
function some(fields) {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

const isPlain = ({ role, prompt, promptName }) => role === undefined && prompt === undefined && promptName === undefined;
const hasPrompt = ({ prompt, promptName }) => prompt !== undefined || promptName !== undefined;
const ownFields = ({ role, prompt, promptName }) => some({ input_type: role, prompt, prompt_name: promptName });

/** The APIs: `requests` gives {path, body} of an intent by verb, or null where the API cannot express it. */
export const APIS = [
  {
    id: "whimbrel", title: "Whimbrel",
    requests: {
      embed: (of) => ({ path: "/v1/embed", body: some({ model: of.model, input: of.texts, outputs: "dense", dimensions: of.dimensions, ...ownFields(of) }) }),
      sparse: (of) => ({ path: "/v1/embed", body: some({ model: of.model, input: of.texts, outputs: "sparse", ...ownFields(of) }) }),
      multiVector: (of) => ({ path: "/v1/embed", body: some({ model: of.model, input: of.texts, outputs: "multi_vector", ...ownFields(of) }) }),
      classify: (of) => ({ path: "/v1/classify", body: { model: of.model, input: of.texts } }),
      entities: (of) => ({ path: "/v1/token_classify", body: some({ model: of.model, input: of.texts, aggregation: of.aggregation }) }),
    },
    python: whimbrelPython,
  },
  {
    id: "openai", title: "OpenAI",
    requests: { embed: (of) => ({ path: "/v1/embeddings", body: some({ model: of.model, input: of.texts, dimensions: of.dimensions, ...ownFields(of) }) }) },
    python: openaiPython,
    javascript: openaiJavaScript,
  },
  {
    id: "cohere", title: "Cohere",
    requests: {
      embed: (of) => !hasPrompt(of) && { path: "/v2/embed", body: some({ model: of.model, texts: of.texts, input_type: cohereType(of), embedding_types: ["float"], output_dimension: of.dimensions }) },
      rerank: (of) => !of.explain && { path: "/v2/rerank", body: some({ model: of.model, query: of.query, documents: of.documents, top_n: of.topN }) },
      tokenize: (of) => of.texts.length === 1 && isPlain(of) && { path: "/v1/tokenize", body: { model: of.model, text: of.texts[0] } },
    },
    python: coherePython,
  },
  {
    id: "voyage", title: "Voyage",
    requests: {
      embed: (of) => !hasPrompt(of) && { path: "/v1/embeddings", body: some({ model: of.model, input: of.texts, input_type: of.role, truncation: true, output_dimension: of.dimensions }) },
      rerank: (of) => !of.explain && { path: "/v1/rerank", body: some({ model: of.model, query: of.query, documents: of.documents, top_k: of.topN, truncation: true }) },
    },
    python: voyagePython,
  },
  {
    id: "jina", title: "Jina",
    requests: {
      embed: (of) => !hasPrompt(of) && { path: "/v1/embeddings", body: some({ model: of.model, input: of.texts, task: jinaTask(of), embedding_type: "float", dimensions: of.dimensions, truncate: true }) },
      multiVector: (of) => !hasPrompt(of) && { path: "/v1/multi-vector", body: some({ model: of.model, input: of.texts, input_type: of.role }) },
      rerank: (of) => ({ path: "/v1/rerank", body: some({ model: of.model, query: of.query, documents: of.documents, top_n: of.topN, explain: of.explain || undefined }) }),
    },
  },
  {
    id: "tei", title: "TEI",
    requests: {
      embed: (of) => of.prompt === undefined && { path: "/embed", body: some({ model: of.model, inputs: of.texts, dimensions: of.dimensions, input_type: of.role, prompt_name: of.promptName }) },
      sparse: (of) => of.prompt === undefined && { path: "/embed_sparse", body: some({ model: of.model, inputs: of.texts, input_type: of.role, prompt_name: of.promptName }) },
      rerank: (of) => !of.explain && of.topN === undefined && { path: "/rerank", body: { model: of.model, query: of.query, texts: of.documents } },
      classify: (of) => ({ path: "/predict", body: { model: of.model, inputs: of.texts.map((text) => [text]) } }),
      tokenize: (of) => ({ path: "/tokenize", body: some({ model: of.model, inputs: of.texts, prompt_name: of.promptName }) }),
    },
  },
  {
    id: "vllm", title: "vLLM",
    requests: {
      embed: (of) => ({ path: "/pooling", body: some({ model: of.model, input: of.texts, task: "embed", dimensions: of.dimensions, truncate_prompt_tokens: -1, ...ownFields(of) }) }),
      rerank: (of) => ({ path: "/rerank", body: some({ model: of.model, query: of.query, documents: of.documents, top_n: of.topN, truncate_prompt_tokens: -1, explain: of.explain || undefined }) }),
      score: (of) => ({ path: "/score", body: some({ model: of.model, queries: of.query, documents: of.documents, truncate_prompt_tokens: -1, explain: of.explain || undefined }) }),
      multiVector: (of) => ({ path: "/pooling", body: some({ model: of.model, input: of.texts, task: "token_embed", ...ownFields(of) }) }),
      classify: (of) => ({ path: "/classify", body: { model: of.model, input: of.texts, truncate_prompt_tokens: -1 } }),
      tokenize: (of) => of.texts.length === 1 && isPlain(of) && { path: "/tokenize", body: { model: of.model, prompt: of.texts[0], return_token_strs: true } },
    },
  },
  {
    id: "ollama", title: "Ollama",
    requests: { embed: (of) => isPlain(of) && { path: "/api/embed", body: some({ model: of.model, input: of.texts, dimensions: of.dimensions }) } },
    python: ollamaPython,
  },
];

/**
 * Return the snippets of a call {method, path, body}: [{api, title, languages: [{id, title, code}]}], as it was sent first.
 * `base` is the server's URL, `withKey` whether it asks for a key.
 */
export function snippetsOf(call, { base, withKey }) {
  const to = { base: base.replace(/\/$/, ""), withKey };
  const sent = { api: "sent", title: "As sent", languages: plainLanguages(call, to) };
  const intent = call.body === undefined ? null : intentOf(call);
  const others = APIS.flatMap(({ id, title, requests, python, javascript }) => {
    const request = intent && requests[intent.verb]?.(intent);
    const client = intent && python?.(intent, to);
    if (!request && !client) return [];
    const languages = [
      ...(client ? [{ id: "python-client", title: "Python (client)", code: client }] : []),
      ...(javascript && request ? [{ id: "javascript-client", title: "JavaScript (client)", code: javascript(intent, to) }] : []),
    ];
    return [{ api: id, title, languages: [...(request ? plainLanguages({ method: "POST", ...request }, to) : []), ...languages] }];
  });
  return [sent, ...others];
}

function plainLanguages(call, to) {
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
  return json.length > SHELL_LIMIT ? `${head}--data-binary @- <<'JSON'\n${json}\nJSON` : `${head}-d ${shellQuoted(json)}`;
}

/** Return a text as one word of a POSIX shell. */
export function shellQuoted(text) {
  return /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

function python({ path, body }, { base, withKey }) {
  const imports = withKey ? "import os\n\nimport requests" : "import requests";
  const key = withKey ? `\n    headers={"Authorization": f"Bearer {os.environ['${VARIABLE}']}"},` : "";
  const content = body === undefined ? "" : `\n    json=${literal(body, PYTHON, 4)},`;
  return `${imports}\n\nanswer = requests.${body === undefined ? "get" : "post"}(\n    ${literal(base + path, PYTHON)},${key}${content}\n)\nanswer.raise_for_status()\nprint(answer.json())`;
}

function javascript({ path, body }, { base, withKey }) {
  const headers = some({ "Content-Type": body === undefined ? undefined : "application/json" });
  const key = withKey ? [`Authorization: \`Bearer \${process.env.${VARIABLE}}\``] : [];
  const fields = [...Object.entries(headers).map(([name, value]) => `"${name}": "${value}"`), ...key].join(", ");
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

/** Return a call in Python, with one keyword a line where it is long. */
function pythonCall(name, positional, keywords) {
  const parts = (indent) => [
    ...positional.map((value) => literal(value, PYTHON, indent)),
    ...Object.entries(some(keywords)).map(([key, value]) => `${key}=${literal(value, PYTHON, indent)}`),
  ];
  const flat = `${name}(${parts(0).join(", ")})`;
  return flat.length <= WIDTH && !flat.includes("\n") ? flat : `${name}(${parts(4).map((part) => `\n    ${part},`).join("")}\n)`;
}

/** Return a client's code: imports, its construction with the key or without one, then what follows. */
function pythonClient(module, name, keywords, { withKey, keyName, noKey }, lines) {
  const entries = Object.entries(some(keywords)).map(([key, value]) => `${key}=${literal(value, PYTHON)}`);
  if (withKey) entries.push(`${keyName}=os.environ["${VARIABLE}"]`);
  else if (noKey !== undefined) entries.push(`${keyName}=${literal(noKey, PYTHON)}`);
  return `${withKey ? "import os\n\n" : ""}from ${module} import ${name}\n\nclient = ${name}(${entries.join(", ")})\n${lines.join("\n")}`;
}

function whimbrelPython(of, { base, withKey }) {
  const options = hasPrompt(of) || of.role !== undefined ? some({ input_type: of.role, prompt: of.prompt, prompt_name: of.promptName }) : {};
  const call = {
    embed: () => pythonCall("vectors = client.embed", [of.texts], { dimensions: of.dimensions, ...options }),
    sparse: () => pythonCall("vectors = client.sparse", [of.texts], options),
    multiVector: () => pythonCall("vectors = client.multi_vector", [of.texts], options),
    rerank: () => (of.explain ? pythonCall("found = client.explain", [of.query, of.documents], {}) : pythonCall("found = client.rerank", [of.query, of.documents], { top_n: of.topN })),
    score: () => typeof of.query === "string" && (of.explain ? pythonCall("found = client.explain", [of.query, of.documents], {}) : pythonCall("scores = client.score", [of.query, of.documents], {})),
    classify: () => pythonCall("found = client.classify", [of.texts], {}),
    entities: () => pythonCall("found = client.token_classify", [of.texts], { aggregation: of.aggregation }),
  }[of.verb]?.();
  if (!call) return null;
  const result = call.slice(0, call.indexOf(" "));
  const code = pythonClient("whimbrel", "Client", {}, { withKey, keyName: "api_key" }, [call, `print(${result})`]);
  const own = [literal(base, PYTHON), ...(of.model ? [`model=${literal(of.model, PYTHON)}`] : [])].join(", ");
  return code.replace("Client(", () => `Client(${own}${withKey ? ", " : ""}`);
}

function openaiPython(of, { base, withKey }) {
  if (of.verb !== "embed") return null;
  const extra = ownFields(of);
  const call = pythonCall("answer = client.embeddings.create", [], { model: of.model, input: of.texts, dimensions: of.dimensions, extra_body: Object.keys(extra).length ? extra : undefined });
  return pythonClient("openai", "OpenAI", { base_url: `${base}/v1` }, { withKey, keyName: "api_key", noKey: "none" }, [call, "print([each.embedding for each in answer.data])"]);
}

function openaiJavaScript(of, { base, withKey }) {
  const key = withKey ? `process.env.${VARIABLE}` : `"none"`;
  const body = some({ model: of.model, input: of.texts, dimensions: of.dimensions, ...ownFields(of) });
  return `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${literal(`${base}/v1`, JAVASCRIPT)}, apiKey: ${key} });\nconst answer = await client.embeddings.create(${literal(body, JAVASCRIPT)});\nconsole.log(answer.data.map((each) => each.embedding));`;
}

const cohereType = ({ role }) => ({ query: "search_query", document: "search_document" })[role] ?? "clustering";
const jinaTask = ({ role }) => ({ query: "retrieval.query", document: "retrieval.passage" })[role];

function coherePython(of, { base, withKey }) {
  const options = { withKey, keyName: "api_key", noKey: "none" };
  if (of.verb === "embed" && !hasPrompt(of)) {
    const call = pythonCall("answer = client.embed", [], { model: of.model, texts: of.texts, input_type: cohereType(of), embedding_types: ["float"], output_dimension: of.dimensions });
    return pythonClient("cohere", "ClientV2", { base_url: base }, options, [call, "print(answer.embeddings.float_)"]);
  }
  if (of.verb !== "rerank" || of.explain) return null;
  const call = pythonCall("answer = client.rerank", [], { model: of.model, query: of.query, documents: of.documents, top_n: of.topN });
  return pythonClient("cohere", "ClientV2", { base_url: base }, options, [call, "print([(each.index, each.relevance_score) for each in answer.results])"]);
}

function voyagePython(of, { base, withKey }) {
  const options = { withKey, keyName: "api_key", noKey: "none" };
  if (of.verb === "embed" && !hasPrompt(of)) {
    const call = pythonCall("answer = client.embed", [of.texts], { model: of.model, input_type: of.role, output_dimension: of.dimensions });
    return pythonClient("voyageai", "Client", { base_url: `${base}/v1` }, options, [call, "print(answer.embeddings)"]);
  }
  if (of.verb !== "rerank" || of.explain) return null;
  const call = pythonCall("answer = client.rerank", [of.query, of.documents], { model: of.model, top_k: of.topN });
  return pythonClient("voyageai", "Client", { base_url: `${base}/v1` }, options, [call, "print([(each.index, each.relevance_score) for each in answer.results])"]);
}

function ollamaPython(of, { base, withKey }) {
  if (of.verb !== "embed" || !isPlain(of)) return null;
  const call = pythonCall("answer = client.embed", [], { model: of.model, input: of.texts, dimensions: of.dimensions });
  const headers = withKey ? `, headers={"Authorization": f"Bearer {os.environ['${VARIABLE}']}"}` : "";
  return `${withKey ? "import os\n\n" : ""}from ollama import Client\n\nclient = Client(host=${literal(base, PYTHON)}${headers})\n${call}\nprint(answer.embeddings)`;
}
