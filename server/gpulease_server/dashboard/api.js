// What is asked of the daemon: GET alone, of this origin alone, each with a time limit and the token if there is one.

import { heard, nowMs } from "./clock.js";

const LIMIT_MS = 20_000;
const MAX_TAGS = 64;
const TOKEN = "gpulease-token";

/** An answer that is none: what the daemon said, or that nothing came (status 0). */
export class Problem extends Error {
  constructor(status, said, retryAfterS = null) {
    const { detail, remedy } = texts(said);
    super(detail || (status ? `The daemon answered ${status}.` : "The daemon does not answer."));
    this.status = status;
    this.said = { ...said, detail, remedy };
    this.retryAfterS = retryAfterS;
  }

  /** Detail and remedy. */
  get sentence() {
    return [this.message, this.said.remedy].filter(Boolean).join(" ");
  }
}

/** What is text of a problem's detail and remedy; a proxy may answer with anything. */
function texts(said) {
  const text = (given) => (typeof given === "string" ? given : "");
  return { detail: text(said?.detail), remedy: text(said?.remedy) };
}

/** An error as a Problem: one that the modules did not foresee, too, so that it is shown and asked again. */
export function asProblem(error) {
  if (error instanceof Problem) return error;
  console.error(error);
  return new Problem(0, { detail: `What came cannot be read: ${error?.message ?? error}.` });
}

/** The token of this tab; "" without one. */
export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

/** Keep a token until the tab is closed; "" forgets it. */
export function setToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
  known.clear();
}

const known = new Map(); // path -> what came last, with its tag

/** The answer of success at a path. Throws Problem. `signal` ends it early. */
export async function answer(path, { headers = {}, signal } = {}) {
  const sent = token() ? { ...headers, Authorization: `Bearer ${token()}` } : headers;
  const askedMs = Date.now();
  let came;
  try {
    came = await fetch(new URL(path, document.baseURI), {
      headers: sent, signal, cache: "no-store", credentials: "same-origin", redirect: "error",
    });
  } catch {
    throw new Problem(0);
  }
  heard(came.headers.get("Date"), askedMs, Date.now());
  if (came.ok || came.status === 304) return came;
  const wait = Number.parseFloat(came.headers.get("Retry-After") ?? "");
  throw new Problem(came.status, await came.json().catch(() => ({})), Number.isNaN(wait) ? null : wait);
}

/** A signal for what may not take longer than LIMIT_MS, and ends with another signal if one is given. */
export function limited(signal) {
  const limit = AbortSignal.timeout(LIMIT_MS);
  return signal ? AbortSignal.any([signal, limit]) : limit;
}

/** The JSON at a path, with how current it is: `{ value, standby, asOfMs }`. What is unchanged is not sent again. */
export async function json(path, signal) {
  const before = known.get(path);
  const headers = before ? { "If-None-Match": before.tag } : {};
  const came = await answer(path, { headers, signal: limited(signal) });
  let value;
  try {
    value = came.status === 304 ? before.value : await came.json();
  } catch {
    throw new Problem(0); // it broke off, or the time was over
  }
  known.delete(path); // the map is in the order of use
  const tag = came.headers.get("ETag");
  if (tag) known.set(path, { tag, value });
  if (known.size > MAX_TAGS) known.delete(known.keys().next().value);
  const asOf = Date.parse(came.headers.get("Gpulease-As-Of") ?? "");
  return { value, standby: came.headers.get("Gpulease-Standby"), asOfMs: Number.isNaN(asOf) ? nowMs() : asOf };
}

/** The items at a path, with what `json` says. Throws Problem where there are none, as from something else than the daemon. */
export async function items(path, signal) {
  const came = await json(path, signal);
  if (!Array.isArray(came.value?.items)) throw new Problem(0, { detail: "Something else than the daemon answers." });
  return { ...came, items: came.value.items };
}

/** A list in pages of `size`, at most `most` items. When a page is refused, those before it are kept. */
export class Pages {
  constructor(path, most, size) {
    this.address = new URL(path, document.baseURI);
    this.address.searchParams.set("limit", String(size));
    this.most = most;
    this.items = [];
  }

  /** All that was asked for, with what `json` says; `more`: there are others. Called again, it goes on where it was. */
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
