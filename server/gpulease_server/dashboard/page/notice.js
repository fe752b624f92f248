// The line that says that the page is not current, and how old its data are.

import { moment, nowMs } from "./clock.js";
import { plain } from "./format.js";
import { element } from "./rows.js";

let currentMs = null; // time of the data that are shown
let lostMs = null; // time of the first failed request in a row
let shown = "";

/** All requests of a round succeeded. */
export function current(standby, asOfMs) {
  currentMs = asOfMs;
  lostMs = null;
  const old = nowMs() - asOfMs > 10_000 ? ` Data from ${moment(asOfMs)}.` : "";
  say(standby ? `This daemon is a standby; the writer is ${plain(standby, 200)}.${old}` : "", false);
}

/** A request failed. */
export function lost(problem) {
  lostMs ??= nowMs();
  const what = problem.status === 0 ? `Disconnected at ${moment(lostMs)}, retrying.` : `Not current since ${moment(lostMs)}.`;
  const why = problem.status === 0 && !problem.fields.detail ? "" : ` ${plain(problem.sentence, 400)}`;
  const age = currentMs === null ? "" : ` Data from ${moment(currentMs)}.`;
  say(`${what}${why}${age}`, true);
}

/** The daemon asks for a token. */
export function waiting() {
  say("", currentMs !== null);
}

/** The page shows no data any more. */
export function cleared() {
  currentMs = null;
  lostMs = null;
  say("", false);
}

function say(text, stale) {
  document.body.classList.toggle("stale", stale);
  if (text === shown) return; // a screen reader would read it out again
  shown = text;
  const place = document.getElementById("notice");
  place.replaceChildren(...(text ? [element("p", { class: "notice", text })] : []));
}
