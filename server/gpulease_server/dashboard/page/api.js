// Requests to the daemon: only to this origin, each with a time limit and the token if there is one.

import { learnFrom, realMs } from "./clock.js";
import { ofDevice, ofTab } from "./storage.js";

const LIMIT_MS = 20_000;
const MAX_TAGS = 64;
const UNUSABLE = { detail: "A token has only letters, digits and signs; this one has others. Copy it again." };
const LONGEST_WAIT_S = 600; // of a Retry-After: a timer of more than 24 days would fire at once
/** Where the token is kept: that of this daemon, which may share its host with others. */
const tokenKey = () => `gpulease-token ${new URL(".", document.baseURI).pathname}`;

/** A failed request: the problem that the daemon answered, or that no answer arrived (status 0). */
export class Problem extends Error {
  /** @param {number} status @param {any} [problem] @param {number | null} [retryAfterS] */
  constructor(status, problem, retryAfterS = null) {
    const { detail, remedy } = texts(problem);
    super(detail || (status ? `The daemon answered ${status}.` : "The daemon does not answer."));
    this.status = status;
    this.fields = { ...problem, detail, remedy };
    this.retryAfterS = retryAfterS;
  }

  /** Detail and remedy. */
  get sentence() {
    return [this.message, this.fields.remedy].filter(Boolean).join(" ");
  }
}

/** Detail and remedy of a problem if they are strings; a proxy may answer with anything. */
function texts(problem) {
  const text = (value) => (typeof value === "string" ? value : "");
  return { detail: text(problem?.detail), remedy: text(problem?.remedy) };
}

/** Any error as a Problem, so that it is shown and the request is sent again. */
export function asProblem(error) {
  if (error instanceof Problem) return error;
  console.error(error);
  return new Problem(0, { detail: `The answer cannot be read: ${error?.message ?? error}.` });
}

/** The token of this tab, or the one that this device remembers; "" without one. */
export function token() {
  return ofTab.getItem(tokenKey()) ?? ofDevice.getItem(tokenKey()) ?? "";
}

/** Keep a token until the tab is closed; "" forgets it, on this device too. */
export function setToken(text) {
  if (text) ofTab.setItem(tokenKey(), text);
  else ofTab.removeItem(tokenKey());
  if (text !== ofDevice.getItem(tokenKey())) ofDevice.removeItem(tokenKey());
  cache.clear();
}

let remember = false;

/** Whether this device is to remember the token of this tab, once it is known that it may only look. */
export function rememberToken(wanted) {
  remember = wanted;
}

/** Remember the token if that is wanted and its role is viewer: others may do too much for a device that anyone may use. */
export function rememberViewersToken(me) {
  if (!remember || me === null) return;
  remember = false;
  if (me.role === "viewer") ofDevice.setItem(tokenKey(), token());
}

const cache = new Map(); // path -> last value and its ETag

/**
 * The successful response of a path. Throws Problem. `signal` aborts the request.
 * @param {string} path
 * @param {{ headers?: Record<string, string>, signal?: AbortSignal, method?: string, body?: string }} options
 */
export async function answer(path, { headers = {}, signal, method = "GET", body } = {}) {
  const sent = token() ? { ...headers, Authorization: `Bearer ${token()}` } : headers;
  if (/[^!-~]/.test(token())) throw new Problem(401, UNUSABLE); // a header has no room for it
  const sentMs = Date.now();
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method,
      body,
      headers: sent,
      signal,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "manual",
    });
  } catch {
    throw new Problem(0);
  }
  if (response.type === "opaqueredirect") throw anotherServer();
  learnFrom(response.headers.get("Date"), sentMs, Date.now());
  if (response.ok || response.status === 304) return response;
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  const waitS = Number.isNaN(wait) ? null : Math.min(wait, LONGEST_WAIT_S);
  throw new Problem(response.status, await response.json().catch(() => ({})), waitS);
}

/** Ask the daemon to do something: its answer. `key` is the same when it is tried again. Throws Problem. */
export async function send(method, path, body, key) {
  const headers = { "Content-Type": "application/json", "Idempotency-Key": key };
  const text = method === "DELETE" ? undefined : JSON.stringify(body);
  const response = await answer(path, { method, body: text, headers, signal: limited() });
  return response.json();
}

/** A signal that aborts after LIMIT_MS, or with another signal if one is given. */
export function limited(/** @type {AbortSignal | undefined} */ signal = undefined) {
  const limit = AbortSignal.timeout(LIMIT_MS);
  return signal ? AbortSignal.any([signal, limit]) : limit;
}

/** The JSON of a path, and how current it is: `{ value, standby, asOfMs }`. The daemon sends only what has changed. */
export async function json(path, signal) {
  const before = cache.get(path);
  /** @type {Record<string, string>} */
  const headers = before ? { "If-None-Match": before.tag } : {};
  const response = await answer(path, { headers, signal: limited(signal) });
  const value = response.status === 304 ? before.value : await read(response);
  cache.delete(path); // keeps the map in the order of use
  const tag = response.headers.get("ETag");
  if (tag) cache.set(path, { tag, value });
  if (cache.size > MAX_TAGS) cache.delete(cache.keys().next().value);
  const asOf = Date.parse(response.headers.get("Gpulease-As-Of") ?? "");
  return { value, standby: response.headers.get("Gpulease-Standby"), asOfMs: Number.isNaN(asOf) ? realMs() : asOf };
}

/** The JSON of a response. Throws Problem. */
async function read(response) {
  const text = await response.text().catch(() => {
    throw new Problem(0); // the connection was lost, or the request timed out
  });
  try {
    return JSON.parse(text);
  } catch {
    throw anotherServer();
  }
}

/** What answers is not the daemon, as a proxy after the session has ended. */
function anotherServer() {
  const detail = "Something other than the daemon answers.";
  return new Problem(0, { detail, remedy: "If you came through a proxy where you sign in, reload this page." });
}

/** The items of a path, with the rest of `json`. Throws Problem if there are none, as from another server. */
export async function items(path, signal) {
  const response = await json(path, signal);
  if (!Array.isArray(response.value?.items)) throw anotherServer();
  return { ...response, items: response.value.items };
}

/** A list in pages of `size`, at most `most` items. If a page is refused, the pages before it are kept. */
export class Pages {
  constructor(path, most, size) {
    this.address = new URL(path, document.baseURI);
    this.address.searchParams.set("limit", String(size));
    this.most = most;
    this.items = [];
  }

  /** All items, with the rest of `json`; `more`: there are others. Called again, it continues where it was. */
  async rest(signal) {
    for (;;) {
      const page = await items(this.address.href, signal);
      const next = page.value.next ?? null;
      this.items.push(...page.items);
      if (next !== null) this.address.searchParams.set("cursor", next);
      if (next === null || this.items.length >= this.most) return { ...page, items: this.items, more: next !== null };
    }
  }
}
