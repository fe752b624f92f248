// The queue: who waits, for what, how long, and a button that explains why.

import { askedFor, plain, who } from "./format.js";
import { namesOfJobs } from "./gpus.js";
import { cell, count, element, keep, sayMore, setText } from "./rows.js";

const MAX_ROWS = 200;
/** The place of a job that waits for other jobs, and joins the queue at its end. */
const LAST = 1e9;

/** Draw the queue; `why(lease)` is called by the button of a row. */
export function drawQueue(place, data, why) {
  const names = namesOfJobs(data);
  const waiting = data.queued.items.toSorted((one, other) => (one.position ?? LAST) - (other.position ?? LAST));
  const views = waiting.slice(0, MAX_ROWS).map(({ id, position, holder, demand, created_at }) => ({
    id, position, holder, demand, created_at, job: names.get(id) ?? null,
  }));
  place.table.hidden = views.length === 0;
  place.none.hidden = views.length > 0;
  keep(place.table.tBodies[0], views, (view) => view.id, (view) => make(view, why), draw);
  sayMore(place.more, waiting.length - views.length, data.queued.more);
}

function make({ id }, why) {
  const parts = {
    position: cell("#", { class: "number" }),
    who: cell("Who"),
    wants: cell("Wants"),
    waiting: cell("Waiting"),
    why: element("button", { type: "button", text: "Why?", "aria-label": `Why does ${id} wait?` }),
  };
  parts.why.addEventListener("click", () => why(id));
  const lease = cell("Lease", { class: "id", text: id });
  parts.node = element("tr", { role: "row" }, parts.position, parts.who, parts.wants, parts.waiting, lease);
  parts.node.append(cell("", { class: "action" }, parts.why));
  return parts;
}

function draw(parts, view) {
  setText(parts.position, String(view.position ?? "-"));
  setText(parts.who, plain(who(view.holder, view.job), 200));
  setText(parts.wants, askedFor(view.demand));
  count(parts.waiting, "since", view.created_at);
}
