// Small things that every view shows: states, users, links, times, bars.

import { moment, nowMs } from "../clock.js";
import { duration, plain } from "../format.js";
import { html } from "../html.js";
import { hueOf } from "../model.js";
import { address } from "../route.js";

/** A shape for each state, so that no one has to tell colours apart. Drawn in a square of 12. */
const SHAPES = {
  free: html`<circle cx="6" cy="6" r="4.5" fill="none" stroke-width="2" />`,
  held: html`<path d="M2 1.5h8M2 10.5h8M3 2l3 4-3 4M9 2L6 6l3 4" fill="none" stroke-width="1.5" />`,
  leased: html`<circle cx="6" cy="6" r="5" class="filled" />`,
  idle: html`<g><circle cx="6" cy="6" r="4.5" fill="none" stroke-width="1.5" /><path d="M6 1.5a4.5 4.5 0 0 1 0 9z" class="filled" /></g>`,
  draining: html`<path d="M10.5 6A4.5 4.5 0 1 1 6 1.5M6 0l2.5 1.7L6 3.6" fill="none" stroke-width="1.6" />`,
  cordoned: html`<path d="M1 6h10" stroke-width="3.5" />`,
  prohibited: html`<g><circle cx="6" cy="6" r="4.8" fill="none" stroke-width="1.8" /><path d="M2.6 9.4l6.8-6.8" stroke-width="1.8" /></g>`,
  foreign: html`<path d="M6 .5L11.5 6 6 11.5.5 6z" class="filled" />`,
  conflict: html`<path d="M6 .8l5.6 10.4H.4z" class="filled" />`,
  unhealthy: html`<path d="M2 2l8 8M10 2l-8 8" stroke-width="3" />`,
  unknown: html`<rect x="1.5" y="1.5" width="9" height="9" fill="none" stroke-width="1.6" stroke-dasharray="2.2 1.8" />`,
};
/** States of jobs, leases and nodes that look like one of a GPU. */
const LIKE = {
  running: "leased",
  active: "leased",
  starting: "draining",
  stopping: "draining",
  queued: "held",
  succeeded: "free",
  failed: "unhealthy",
  lost: "unhealthy",
  timed_out: "unhealthy",
  cancelled: "cordoned",
  ended: "free",
  paused: "cordoned",
  ready: "free",
};

/** A state: shape, word and colour. */
export function State({ state, word = state, big = false }) {
  const shape = SHAPES[state] ?? SHAPES[LIKE[state]] ?? SHAPES.unknown;
  const words = plain(word).replaceAll("_", " ");
  return html`<span class=${`state state-${state}${big ? " big" : ""}`}>
    <svg viewBox="0 0 12 12" aria-hidden="true">${shape}</svg>${words}
  </span>`;
}

/** A user's name with their colour; nothing for a holder without one. */
export function User({ name }) {
  if (!name) return null;
  return html`<span class=${`user hue-${hueOf(name)}`}><i aria-hidden="true"></i>${plain(name)}</span>`;
}

/** A link inside the page. */
export function Link({ view, id = "", query = {}, children, ...rest }) {
  return html`<a href=${address(view, id, query)} ...${rest}>${children}</a>`;
}

/** A moment, in full as its title. */
export function Moment({ at }) {
  if (at === null || at === undefined) return "-";
  return html`<time datetime=${at} title=${at}>${moment(Date.parse(at))}</time>`;
}

/** For how long something has been so, or was so until `to`. */
export function Since({ at, to = null }) {
  if (at === null || at === undefined) return "-";
  const endMs = to === null ? nowMs() : Date.parse(to);
  return html`<time datetime=${at} title=${moment(Date.parse(at))}>${duration((endMs - Date.parse(at)) / 1000)}</time>`;
}

/** A share of 1 as a bar, beside words that say the same; empty when it is unknown. */
export function Bar({ ratio, tone = "" }) {
  if (ratio === null || ratio === undefined) return html`<span class="bar unknown"></span>`;
  return html`<svg class=${`bar ${tone}`} viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
    <rect class="track" width="100" height="4" /><rect class="fill" width=${Math.min(100, 100 * ratio)} height="4" />
  </svg>`;
}

/** A line of at most `most` things, and how many more there are. */
export function More({ hidden, atLeast = false }) {
  if (hidden <= 0 && !atLeast) return null;
  return html`<p class="more">… and ${atLeast ? "at least " : ""}${Math.max(1, hidden)} more</p>`;
}

/** A sentence in place of data that the daemon did not give. */
export function Refusal({ problem }) {
  return html`<p class="problem" role="alert">${plain(problem.sentence, 500)}</p>`;
}
