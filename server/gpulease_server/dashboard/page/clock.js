// The daemon's time. The browser's clock may be wrong; the Date of each answer says by how much.

const TOLERANCE_MS = 1000; // Date has whole seconds
let aheadMs = null;

/** Learn from the Date of a response, which was requested and arrived at these times of the browser's clock. */
export function learnFrom(date, sentMs, arrivedMs) {
  const serverMs = Date.parse(date ?? "") + 500;
  if (Number.isNaN(serverMs)) return;
  const offsetMs = serverMs - (sentMs + arrivedMs) / 2;
  // Within the tolerance nothing changes, so that countdowns do not jump.
  if (aheadMs === null || Math.abs(offsetMs - aheadMs) > TOLERANCE_MS + (arrivedMs - sentMs) / 2) aheadMs = offsetMs;
}

/** Now, in milliseconds since 1970. */
export function realMs() {
  return Date.now() + (aheadMs ?? 0);
}

let frozenMs = null;

/** Stop what is shown at a moment, or let it go on: null. */
export function freeze(atMs) {
  frozenMs = atMs;
}

/** Now, as long as the data are current. */
export function nowMs() {
  return frozenMs ?? realMs();
}

/** A time in this browser's zone, with the date if it is another day. */
export function moment(atMs) {
  const at = new Date(atMs);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date(nowMs()).toDateString() ? time : `${at.toLocaleDateString("sv-SE")} ${time}`;
}

/** A time of day without seconds, for a wall. */
export function wallTime(atMs) {
  return new Date(atMs).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}
