// What is asked of the daemon: GET alone, of this origin alone, each with a time limit and the token if there is one.

import { heard, nowMs } from "./clock.js";

const LIMIT_MS = 20_000;
const PAGE_ITEMS = 1000;
const MAX_TAGS = 64;
const TOKEN = "gpulease-token";

/** An answer that is none: what the daemon said, or that nothing came (status 0). */
export class Problem extends Error {
  constructor(status, said = {}, retryAfterS = null) {
    super(said.detail || (status ? `The daemon answered ${status}.` : "The daemon does not answer."));
    this.status = status;
    this.said = said;
    this.retryAfterS = retryAfterS;
  }

  /** Detail and remedy. */
  get sentence() {
    return [this.message, this.said.remedy].filter(Boolean).join(" ");
  }
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

/** The answer of success at a path. Throws Problem. `signal` ends it early; without one it has LIMIT_MS. */
export async function answer(path, { headers = {}, signal = AbortSignal.timeout(LIMIT_MS) } = {}) {
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

/** The JSON at a path, with how current it is: `{ value, standby, asOfMs }`. What is unchanged is not sent again. */
export async function json(path) {
  const before = known.get(path);
  const came = await answer(path, { headers: before ? { "If-None-Match": before.tag } : {} });
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

/** Items of a list over its pages, at most `most`; `more` says that there are others. */
export async function list(path, most = PAGE_ITEMS) {
  const asked = new URL(path, document.baseURI);
  const paged = most < PAGE_ITEMS ? most : PAGE_ITEMS;
  const items = [];
  let last;
  do {
    asked.searchParams.set("limit", String(paged));
    last = await json(asked.href);
    items.push(...last.value.items);
    if (last.value.next !== null) asked.searchParams.set("cursor", last.value.next);
  } while (last.value.next !== null && items.length < most);
  return { ...last, items, more: last.value.next !== null };
}
