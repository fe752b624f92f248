// Elements that stay while they show the same thing, so that focus, selection and scrolling survive a new answer.
// All text of users goes through `textContent`.

import { duration } from "./format.js";
import { moment, nowMs } from "./clock.js";

/** A new element. `given` are properties and attributes; `class`, `text` and what begins with `data-` or `aria-`, too. */
export function element(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "text") made.textContent = value;
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A cell with its column's name, which narrow screens show. Roles say again what CSS takes away there. */
export function cell(label, given = {}, ...children) {
  return element("td", { role: "cell", "data-label": label, ...given }, ...children);
}

/** A state: its word, and beside it its colour. `word` may be made of two, as `leased (idle)`. */
export function stateMark(mark, state, activity = null) {
  setText(mark, activity ? `${state} (${activity})` : state);
  mark.className = `state state-${state}${activity ? ` activity-${activity}` : ""}`;
}

/** Change text only where it differs: an announcement or a selection is not to be disturbed. */
export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** Make `parent` hold one child for each item, in order. `make(item)` gives its `node`; `draw(made, item)` fills it. */
export function keep(parent, items, keyOf, make, draw) {
  const before = parent.kept ?? new Map();
  const now = new Map();
  for (const item of items) now.set(keyOf(item), before.get(keyOf(item)) ?? make(item));
  parent.kept = now;
  for (const [key, made] of before) if (!now.has(key)) made.node.remove();
  let place = parent.firstChild;
  for (const item of items) {
    const made = now.get(keyOf(item));
    const spelled = JSON.stringify(item);
    if (made.spelled !== spelled) draw(made, item);
    made.spelled = spelled;
    if (made.node === place) place = place.nextSibling;
    else parent.insertBefore(made.node, place);
  }
}

/** Show how long it is to a moment (`until`) or has been since one (`since`), and go on counting. */
export function count(place, direction, at) {
  delete place.dataset.until;
  delete place.dataset.since;
  place.title = at === null ? "" : moment(Date.parse(at));
  if (at === null) setText(place, "-");
  else {
    place.dataset[direction] = at;
    tickOne(place);
  }
}

/** Let everything that counts show the time that it is now. Once a second. */
export function tick() {
  for (const place of document.querySelectorAll("[data-until], [data-since]")) tickOne(place);
}

function tickOne(place) {
  const { until, since } = place.dataset;
  if (until !== undefined) setText(place, `in ${duration((Date.parse(until) - nowMs()) / 1000)}`);
  else setText(place, duration((nowMs() - Date.parse(since)) / 1000));
}

/** Say how many are not drawn. `atLeast`: there are others of which the daemon was not asked. */
export function sayMore(place, hidden, atLeast) {
  setText(place, hidden > 0 || atLeast ? `… and ${atLeast ? "at least " : ""}${Math.max(1, hidden)} more` : "");
}
