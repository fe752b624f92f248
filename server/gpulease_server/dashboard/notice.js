// The line that says when what is shown is not current, and of when it is.

import { moment, nowMs } from "./clock.js";
import { plain } from "./format.js";
import { element } from "./rows.js";

let currentMs = null; // of when what is shown is
let lostMs = null; // since when nothing came
let said = "";

/** Everything that was asked for came. */
export function current(standby, asOfMs) {
  currentMs = asOfMs;
  lostMs = null;
  const old = nowMs() - asOfMs > 10_000 ? ` What is shown is its copy of ${moment(asOfMs)}.` : "";
  say(standby ? `This daemon stands by and only shows; the writer is ${plain(standby, 200)}.${old}` : "", false);
}

/** Something did not come. */
export function lost(problem) {
  lostMs ??= nowMs();
  const what = problem.status === 0 ? "Not connected" : "Not current";
  const why = problem.status === 0 && !problem.said.detail ? "" : ` ${plain(problem.sentence, 400)}`;
  const shown = currentMs === null ? "" : ` What is shown is of ${moment(currentMs)}.`;
  say(`${what} since ${moment(lostMs)}.${why}${shown}`, true);
}

/** The daemon wants to know who asks. */
export function waiting() {
  say("", currentMs !== null);
}

/** Nothing is shown any more. */
export function cleared() {
  currentMs = null;
  lostMs = null;
  say("", false);
}

function say(text, stale) {
  document.body.classList.toggle("stale", stale);
  if (text === said) return; // it would be read out again
  said = text;
  const place = document.getElementById("notice");
  place.replaceChildren(...(text ? [element("p", { class: "notice", text })] : []));
}
