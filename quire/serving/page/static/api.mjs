// The server's API: the key, errors in words, server-sent events.

const KEY = "quire-api-key";

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

// What went wrong, for people to read.
export class Problem extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  get text() {
    const wait = this.retryAfterS === null ? "" : ` Try again in ${this.retryAfterS} s.`;
    if (this.status === 429) return `Too many requests (429): ${this.message}.${wait}`;
    if (this.status === 503) return `The server is busy or not ready (503): ${this.message}.${wait}`;
    return this.status ? `Error ${this.status}: ${this.message}.${wait}` : this.message;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it running, and is the network up?";
export const CUT = "The connection was cut before the answer was complete.";

let askForKey = null; // set by the page: an async function that says whether there is a new key
export const onKeyNeeded = (ask) => { askForKey = ask; };

async function problemOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = {}; // a proxy's error page is not JSON: the status has to do
  }
  const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const message = String(error.message ?? (response.statusText || "no reason was given")).replace(/\.$/, "");
  return new Problem(message, { status: response.status, code: error.code ?? null, retryAfterS: Number.isNaN(seconds) ? null : seconds });
}

// Where the server has a path. This file is at ui/api.mjs, perhaps behind a prefix of a proxy.
export const urlOf = (path) => new URL(path.replace(/^\/+/, ""), new URL("../", import.meta.url)).href;

// A router serves several models; the page works with one of them.
let model = null;
export const chooseModel = (name) => { model = name; };
export const withModel = (path) => (model === null ? path : `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(model)}`);

// Returns the response of a request that succeeded. Throws Problem, or the AbortError of its signal.
// ownKey: a key for this request only, which nobody is asked for
export async function send(path, { body, signal, headers = {}, ownKey = null } = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const key = ownKey ?? storedKey();
    const isForm = body instanceof FormData; // its type, with the border in it, is the browser's to say
    const all = { ...headers, ...(key && { authorization: `Bearer ${key}` }), ...(body && !isForm && { "content-type": "application/json" }) };
    const options = { method: body ? "POST" : "GET", headers: all, signal, credentials: "omit", cache: "no-store" };
    if (body) options.body = isForm ? body : JSON.stringify(body);
    let response;
    try {
      response = await fetch(urlOf(path), options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(UNREACHABLE);
    }
    if (response.ok) return response;
    const problem = await problemOf(response);
    const mayAsk = response.status === 401 && ownKey === null && askForKey !== null && attempt < 8;
    if (!mayAsk || !(await askForKey(key ? problem.message : null, key))) throw problem;
  }
}

export const getJson = async (path, options) => (await send(path, options)).json();

// Yields {event, id, data} of a response's server-sent events. Throws Problem where the connection breaks.
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let current = { event: "message", id: "", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const lines = buffer.split(/\r\n|\n/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (current.data.length) yield { ...current, data: current.data.join("\n") };
          current = { event: "message", id: current.id, data: [] };
          continue;
        }
        const colon = line.indexOf(":");
        if (colon === 0) continue; // a comment
        const name = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (name === "data") current.data.push(text);
        else if (name === "event" || name === "id") current[name] = text;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem(CUT);
  } finally {
    reader.cancel().catch(() => undefined); // it may have failed already
  }
}

// Yields the JSON chunks of a stream of the OpenAI API. Throws Problem for an error in it, or when [DONE] never comes.
export async function* chunks(response) {
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Problem(CUT);
    }
    if (chunk.error) throw new Problem(String(chunk.error.message ?? "unknown").replace(/\.$/, ""), { code: chunk.error.code ?? null, status: 500 });
    yield chunk;
  }
  throw new Problem(CUT);
}
