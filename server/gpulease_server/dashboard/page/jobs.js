// Live jobs, and jobs that ended recently, newest first.

import { duration, places, plain } from "./format.js";
import { cell, count, element, keep, sayMore, setText, stateMark } from "./rows.js";

const MAX_ROWS = 200;
const ORDER = ["running", "starting", "stopping", "queued"];

/** Draw the jobs; `log(job)` is called by the button of a row. */
export function drawJobs(place, data, log) {
  const severalNodes = data.nodes.items.length > 1;
  const jobs = merged(data);
  const views = jobs.slice(0, MAX_ROWS).map(({ command, traceback, launcher, ...job }) => ({
    ...job, gpus: places(job.gpus, severalNodes),
  }));
  place.table.hidden = views.length === 0;
  place.none.hidden = views.length > 0;
  keep(place.table.tBodies[0], views, (view) => view.id, (view) => make(view, log), draw);
  sayMore(place.more, jobs.length - views.length, data.waiting.more || data.working.more || data.over.more);
}

/** Every job once: one that changed its state between two answers is in both, and the later one counts. */
function merged(data) {
  const all = [...data.waiting.items, ...data.working.items, ...data.over.items];
  const place = ({ state }) => (ORDER.includes(state) ? ORDER.indexOf(state) : ORDER.length);
  return [...new Map(all.map((job) => [job.id, job])).values()].sort((one, other) => place(one) - place(other));
}

function make(view, log) {
  const parts = {
    name: element("strong"),
    state: element("span"),
    user: cell("User"),
    gpus: cell("GPUs"),
    time: cell("Time"),
    exit: cell("Exit code", { class: "number" }),
    reason: cell("Reason", { class: "job-reason" }),
    log: element("button", { type: "button", text: "Log" }),
  };
  parts.log.addEventListener("click", () => log(parts.shown));
  const id = element("span", { class: "id", text: view.id });
  parts.node = element("tr", { role: "row" }, cell("Job", { class: "job" }, parts.name, " ", id));
  parts.node.append(cell("State", {}, parts.state), parts.user, parts.gpus, parts.time, parts.exit, parts.reason);
  parts.node.append(cell("", { class: "action" }, parts.log));
  return parts;
}

function draw(parts, job) {
  parts.shown = job;
  const index = job.array_index === null ? "" : `[${job.array_index}]`;
  setText(parts.name, job.name ? plain(job.name) + index : index);
  stateMark(parts.state, job.state);
  setText(parts.user, plain(job.user ?? "?"));
  setText(parts.gpus, job.gpus);
  setText(parts.exit, job.exit_code === null ? "-" : String(job.exit_code));
  setText(parts.reason, plain(job.reason ?? "", 200));
  parts.log.hidden = job.attempts === 0;
  parts.log.setAttribute("aria-label", `Log of ${job.name ? plain(job.name) : job.id}`);
  drawTime(parts.time, job);
}

/** How long a job has run or ran; how long a queued one has waited. */
function drawTime(place, job) {
  if (job.ended_at === null) {
    count(place, "since", job.started_at ?? job.created_at);
    return;
  }
  count(place, "since", null);
  place.title = job.ended_at;
  if (job.started_at !== null) {
    setText(place, duration((Date.parse(job.ended_at) - Date.parse(job.started_at)) / 1000));
  }
}
