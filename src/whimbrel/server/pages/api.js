/** Calls to this server: key, errors of any API in one sentence, waits, and the log of calls. The key stays in memory. */

const BASE = new URL(".", document.baseURI);
BASE.username = BASE.password = ""; // of an address such as //user:password@host/, which fetch refuses
const PATIENCE = 180; // seconds that a call waits for a server that says when to come back
const LOGGED = 24;

/** A failed call. `kind` is "network", "key", "request", "server" or "answer". */
class ApiError extends Error {
  constructor(message, kind, status = 0) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

/** What is wrong with a text as a key, "" if nothing: headers take no other characters. */
export function faultOfKey(key) {
  return /^[\x21-\x7e]*$/.test(key) ? "" : "A key has letters, digits and signs of ASCII, and no spaces.";
}

/** Return the URL of a path of this server, under the prefix that a proxy may have put before it. */
export function urlOf(path) {
  return new URL(path.replace(/^\//, ""), BASE).href;
}

/** Return an answer's error message, whichever API's shape it has, or "". */
export function messageOf(data) {
  if (typeof data === "string") return data;
  if (Array.isArray(data)) return data.map(messageOf).filter(Boolean).join(" ");
  if (data === null || typeof data !== "object") return "";
  return messageOf(data.error ?? data.message ?? data.detail ?? data.msg ?? "");
}

function sentence(text) {
  const trimmed = text.trim();
  const isPath = /^[\w.[\]]+: /.test(trimmed);
  const first = isPath ? trimmed : trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

export class Api {
  #key = "";
  #asking = null;

  /** `askKey(wasWrong)` resolves to a key, or to "" where the user gives none. */
  constructor(askKey) {
    this.askKey = askKey;
    /** Calls that succeeded, the newest last: {tab, method, path, body, status, ms, headers}. */
    this.log = [];
  }

  get hasKey() {
    return this.#key !== "";
  }

  /** Ask for a key, and keep the one before where the user gives none. Return what was typed. */
  async changeKey(wasWrong = false) {
    this.#asking ??= this.askKey(wasWrong).finally(() => (this.#asking = null)); // one dialog for all calls that wait
    const key = await this.#asking;
    if (key) this.#key = key;
    return key;
  }

  /**
   * Send JSON and return {data, headers, status, ms, cut}, `cut` texts beyond the limit. Throws ApiError, or AbortError if `signal` aborts.
   * It asks for a key where one is needed, and waits where the server says when to come back.
   * `onwait` gets a sentence while the call waits, and "" once it goes on.
   */
  async call(path, body, { method = body === undefined ? "GET" : "POST", signal, onwait = () => {}, tab = "" } = {}) {
    const until = performance.now() + 1000 * PATIENCE;
    for (;;) {
      const start = performance.now();
      const used = this.#key;
      const { response, text } = await this.#send(path, body, { method, signal, onwait });
      const data = parse(text);
      if (response.ok) {
        if (data === undefined) throw new ApiError("The answer ended early or is not from Whimbrel.", "answer", response.status);
        const { headers, status } = response;
        const answer = { data, headers, status, ms: performance.now() - start, cut: Number(headers.get("x-whimbrel-truncated") ?? 0) };
        if (tab) this.#remember({ tab, method, path, body, ...answer, data: undefined });
        return answer;
      }
      if (response.status === 401) {
        const renewed = used !== this.#key || (await this.changeKey(used !== ""));
        if (!renewed) throw new ApiError("This server asks for a key.", "key", 401);
      } else if (comesBack(response) && performance.now() < until) await pause(response, data, signal, onwait);
      else throw failure(response, data);
    }
  }

  async #send(path, body, { method, signal, onwait }) {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    if (this.#key) headers.authorization = `Bearer ${this.#key}`;
    const content = body === undefined ? undefined : JSON.stringify(body);
    const waiting = { told: false, over: false };
    const watch = body === undefined ? undefined : setInterval(() => this.#explain(onwait, waiting), 1500);
    try {
      const response = await fetch(urlOf(path), { method, headers, body: content, signal, cache: "no-store", credentials: "same-origin" });
      return { response, text: await response.text() };
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const offline = navigator.onLine === false ? "This computer is offline." : "The server may have stopped, or the network is down.";
      throw new ApiError(`No connection to the server. ${offline}`, "network");
    } finally {
      clearInterval(watch);
      waiting.over = true;
    }
  }

  /** Tell why a call takes long, where the server is not ready, and when that is over. */
  async #explain(onwait, waiting) {
    try {
      const response = await fetch(urlOf("health"), { cache: "no-store" });
      const reason = response.ok ? "" : messageOf(parse(await response.text()) ?? "");
      if (waiting.over || (!reason && !waiting.told)) return;
      waiting.told = reason !== "";
      onwait(reason && `${sentence(reason)} The call waits for it.`);
    } catch {
      // the call itself reports a lost connection
    }
  }

  #remember(call) {
    this.log.push(call);
    if (this.log.length > LOGGED) this.log.shift();
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Return whether the same call may succeed later. */
function comesBack({ status, headers }) {
  return [429, 503].includes(status) && headers.get("x-should-retry") !== "false";
}

function failure(response, data) {
  const message = messageOf(data ?? "");
  const kind = response.status < 500 ? "request" : "server";
  if (message) return new ApiError(sentence(message), kind, response.status);
  const name = response.statusText ? ` (${response.statusText})` : "";
  return new ApiError(`The answer has status ${response.status}${name} and no reason; it may come from a proxy.`, kind, response.status);
}

/** Wait as long as the answer says, and tell each second. */
async function pause(response, data, signal, onwait) {
  const stated = Number(response.headers.get("retry-after"));
  const seconds = Math.min(30, Math.max(1, Number.isFinite(stated) ? Math.ceil(stated) : 2));
  const reason = sentence(messageOf(data ?? "") || "The server is busy");
  for (let left = seconds; left > 0; left -= 1) {
    onwait(`${reason} Next try in ${left} s.`);
    await delay(1000, signal);
  }
  onwait("");
}

/** Return a promise that resolves after `ms` milliseconds, or rejects with AbortError. */
function delay(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const timer = setTimeout(finish, ms);
    function finish() {
      signal?.removeEventListener("abort", cancel);
      resolve();
    }
    function cancel() {
      clearTimeout(timer);
      reject(signal.reason);
    }
    signal?.addEventListener("abort", cancel, { once: true });
  });
}
