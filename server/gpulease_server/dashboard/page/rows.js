// Keyed reconciliation: elements stay while they show the same item, so that focus, selection and scrolling survive an
// update. All text of users goes through `textContent`.

import { duration } from "./format.js";
import { moment, nowMs } from "./clock.js";

/** A new element with these attributes; `text` is its text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A cell with the name of its column, which narrow screens show. Roles repeat what CSS removes there. */
export function cell(label, attributes = {}, ...children) {
  return element("td", { role: "cell", "data-label": label, ...attributes }, ...children);
}

/** A state: a word and a color; with its activity, as in `leased (idle)`. */
export function stateMark(mark, state, activity = null) {
  setText(mark, activity ? `${state} (${activity === "starting" ? "unused" : activity})` : state);
  mark.className = `state state-${state}${activity ? ` activity-${activity}` : ""}`;
}

/** Change text only if it differs, so that announcements and selections are not disturbed. */
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
    const serialized = JSON.stringify(item);
    if (made.serialized !== serialized) draw(made, item);
    made.serialized = serialized;
    if (made.node === place) place = place.nextSibling;
    else parent.insertBefore(made.node, place);
  }
}

/** Show the time until (`until`) or since (`since`) a moment, and keep counting. */
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

/** Update everything that counts. Called once a second. */
export function tick() {
  for (const place of document.querySelectorAll("[data-until], [data-since]")) tickOne(place);
}

function tickOne(place) {
  const { until, since } = place.dataset;
  if (until !== undefined) setText(place, `in ${duration((Date.parse(until) - nowMs()) / 1000)}`);
  else setText(place, duration((nowMs() - Date.parse(since)) / 1000));
}

/** Say how many items are not drawn. `atLeast`: there are others that were not fetched. */
export function sayMore(place, hidden, atLeast) {
  setText(place, hidden > 0 || atLeast ? `… and ${atLeast ? "at least " : ""}${Math.max(1, hidden)} more` : "");
}
