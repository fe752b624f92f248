// The line at the top: GPUs by state, queued requests, running jobs.

import { element, keep, setText } from "./rows.js";

const STATES = ["free", "leased", "draining", "foreign", "cordoned", "prohibited", "unhealthy", "unknown"];

/** Draw the totals into a list, and the number of free GPUs into the title of the tab. */
export function drawTotals(place, data) {
  const gpus = data.gpus.items;
  const of = (state) => gpus.filter((gpu) => gpu.state === state).length;
  const running = data.working.items.filter((job) => job.state === "running").length;
  const atLeast = (list) => (list.more ? "+" : "");
  const views = [
    { word: gpus.length === 1 ? "GPU" : "GPUs", number: String(gpus.length) },
    ...STATES.filter((state) => of(state) || state === "free").map((state) => ({
      word: state, number: String(of(state)), state,
    })),
    { word: "queued", number: data.queued.items.length + atLeast(data.queued) },
    { word: running === 1 ? "job running" : "jobs running", number: running + atLeast(data.working) },
  ];
  keep(place, views, ({ word, state }) => state ?? (word.startsWith("job") ? "jobs" : word), make, draw);
  document.title = `${of("free")} of ${gpus.length} free · gpulease`;
}

function make({ state }) {
  const parts = { number: element("b"), word: element("span") };
  const mark = state ? `state state-${state}` : "";
  parts.node = element("li", { class: mark, "data-total": state ?? "" }, parts.number, " ", parts.word);
  return parts;
}

function draw(parts, { word, number }) {
  setText(parts.number, number);
  setText(parts.word, word);
}
