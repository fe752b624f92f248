// The daemon's time. The browser's clock may be wrong; the Date of each answer says by how much.

const TOLERANCE_MS = 1000; // Date has whole seconds
let aheadMs = null;

/** Learn from an answer that was asked for and came at these moments of the browser's clock. */
export function heard(date, askedMs, cameMs) {
  const saidMs = Date.parse(date ?? "") + 500;
  if (Number.isNaN(saidMs)) return;
  const foundMs = saidMs - (askedMs + cameMs) / 2;
  // Within the tolerance nothing new was learnt, and seconds that count down should not jump.
  if (aheadMs === null || Math.abs(foundMs - aheadMs) > TOLERANCE_MS + (cameMs - askedMs) / 2) aheadMs = foundMs;
}

/** Now, in milliseconds since 1970. */
export function nowMs() {
  return Date.now() + (aheadMs ?? 0);
}

/** A moment as this browser's zone has it: the time, with the date where that is another day. */
export function moment(atMs) {
  const at = new Date(atMs);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date(nowMs()).toDateString() ? time : `${at.toLocaleDateString("sv-SE")} ${time}`;
}
