// GPUs by node: state, holder, time left, readings, and processes.

import { amount, gibibytes, percent, plain, who } from "./format.js";
import { cell, count, element, keep, sayMore, setText, stateMark } from "./rows.js";

const MAX_NODES = 64;
const MAX_GPUS = 512; // rows of all nodes together
const MAX_PROCESSES = 8; // of one GPU
const HEADS = ["GPU", "State", "Holder", "Until", "Memory", "Utilization", "Temp.", "Power"];

/** Draw the nodes, and say how many are not drawn. */
export function drawNodes({ place, more }, data) {
  const leases = new Map(data.active.items.map((lease) => [lease.id, lease]));
  const views = nodeViews(data, leases, namesOfJobs(data));
  keep(place, views.slice(0, MAX_NODES), (view) => view.name, makeNode, drawNode);
  place.querySelector(":scope > .none")?.remove();
  if (!views.length) place.append(element("p", { class: "none", text: "No GPUs are known." }));
  setText(more, views.length > MAX_NODES ? `… and ${views.length - MAX_NODES} more nodes` : "");
}

/** Names of the fetched live jobs, by lease. */
export function namesOfJobs(data) {
  return new Map([...data.waiting.items, ...data.working.items].map((job) => [job.lease_id, job.name || job.id]));
}

function nodeViews(data, leases, names) {
  const nodes = new Map(data.nodes.items.map((node) => [node.name, { ...about(node), gpus: [] }]));
  for (const gpu of data.gpus.items) {
    if (!nodes.has(gpu.node)) nodes.set(gpu.node, { name: gpu.node, state: "ready", mode: "active", gpus: [] });
    nodes.get(gpu.node).gpus.push(gpuView(gpu, leases.get(gpu.lease_id), names.get(gpu.lease_id)));
  }
  const views = [...nodes.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  let room = MAX_GPUS;
  for (const view of views) {
    view.gpus.sort((one, other) => one.index - other.index);
    view.count = view.gpus.length;
    view.gpus = view.gpus.slice(0, room);
    room -= view.gpus.length;
  }
  return views;
}

function about({ name, state, mode, reason, driver_version: driver, simulated }) {
  return { name, state, mode, reason, driver, simulated };
}

function gpuView(gpu, lease, job) {
  const { observed_at, last_busy_at, opened_by, ...shown } = gpu; // left out: they change with every reading, and are not drawn
  const until = lease?.state === "active" ? lease.expires_at : null;
  return { ...shown, until, job: job ?? null, problems: lease?.problems ?? [] };
}

function makeNode({ name }) {
  const parts = {
    heading: element("h3", { text: plain(name) }),
    marks: element("span", { class: "marks" }),
    facts: element("span", { class: "facts" }),
    reason: element("p", { class: "reason" }),
    more: element("p", { class: "more" }),
    table: element("table", { role: "table", class: "gpus", "aria-label": `GPUs of ${plain(name)}` }),
  };
  const heads = HEADS.map((text) => element("th", { role: "columnheader", scope: "col", text }));
  parts.table.append(element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)));
  parts.rows = element("tbody", { role: "rowgroup" });
  parts.table.append(parts.rows);
  const head = element("div", { class: "node-head" }, parts.heading, parts.marks, parts.facts);
  parts.node = element("article", { class: "node" }, head, parts.reason, parts.table, parts.more);
  return parts;
}

function drawNode(parts, view) {
  const marks = [view.state !== "ready" && view.state, view.mode !== "active" && view.mode].filter(Boolean);
  parts.marks.replaceChildren(...marks.map((word) => element("span", { class: `state state-${word}`, text: word })));
  const facts = [
    `${view.count} GPU${view.count === 1 ? "" : "s"}`,
    view.driver && `driver ${plain(view.driver)}`,
    view.simulated && "simulated",
  ];
  setText(parts.facts, facts.filter(Boolean).join(" · "));
  setText(parts.reason, view.reason ? plain(view.reason, 300) : "");
  parts.table.hidden = view.gpus.length === 0;
  keep(parts.rows, view.gpus, (gpu) => gpu.uuid, makeGpu, drawGpu);
  sayMore(parts.more, view.count - view.gpus.length, false);
}

function makeGpu({ uuid }) {
  const parts = {
    index: element("strong"),
    name: element("span", { class: "model" }),
    uuid: element("button", { type: "button", class: "uuid", title: `Copy ${plain(uuid)}`, text: plain(uuid, 15) }),
    state: element("span"),
    cordoned: element("span", { class: "state state-cordoned" }),
    health: element("span", { class: "facts" }),
    holder: cell("Holder", { class: "holder" }),
    until: cell("Until", { class: "until" }),
    memory: reading(),
    use: reading(),
    temperature: cell("Temp.", { class: "figure" }),
    power: cell("Power", { class: "figure" }),
    notes: element("ul", { class: "notes" }),
  };
  parts.uuid.addEventListener("click", () => copy(parts.uuid, uuid));
  const name = cell("GPU", { class: "gpu" }, parts.index, element("div", {}, parts.name, parts.uuid));
  const state = cell("State", { class: "gpu-state" }, parts.state, parts.cordoned, parts.health, parts.notes);
  parts.node = element("tr", { role: "row", class: "gpu-row" }, name, state, parts.holder, parts.until);
  parts.node.append(cell("Memory", {}, ...parts.memory.all), cell("Utilization", {}, ...parts.use.all));
  parts.node.append(parts.temperature, parts.power);
  return parts;
}

/** A number with a bar under it, which repeats the number. */
function reading() {
  const text = element("span", { class: "reading" });
  const bar = element("progress", { max: "1", "aria-hidden": "true" });
  return { text, bar, all: [text, bar] };
}

function drawReading({ text, bar }, words, ratio) {
  setText(text, words);
  bar.hidden = ratio === null;
  if (ratio !== null) bar.value = Math.min(1, ratio);
}

function drawGpu(parts, gpu) {
  setText(parts.index, String(gpu.index));
  setText(parts.name, plain(gpu.name ?? "?"));
  stateMark(parts.state, gpu.state, gpu.state === "leased" ? gpu.activity : null);
  const also = gpu.cordoned && gpu.state !== "cordoned";
  parts.cordoned.hidden = !also;
  setText(parts.cordoned, also ? "cordoned" : "");
  const problems = [...(gpu.health === "ok" ? [] : [gpu.health]), ...(gpu.warnings ?? [])];
  setText(parts.health, problems.map((word) => plain(word)).join(", "));
  setText(parts.holder, who(gpu.holder, gpu.job));
  parts.holder.toggleAttribute("data-empty", gpu.holder === null);
  count(parts.until, "until", gpu.until);
  parts.until.toggleAttribute("data-empty", gpu.until === null);
  const { memory_used_bytes: used, memory_total_bytes: total } = gpu;
  const share = used === null || !total ? null : used / total;
  drawReading(parts.memory, `${gibibytes(used)} / ${gibibytes(total)} GiB`, share);
  drawReading(parts.use, percent(gpu.utilization_ratio), gpu.utilization_ratio);
  setText(parts.temperature, amount(gpu.temperature_c, "°C"));
  setText(parts.power, amount(gpu.power_w, "W"));
  parts.notes.replaceChildren(...notes(gpu));
}

/** Why the GPU is not free, problems of its lease, and its processes. */
function notes(gpu) {
  const own = gpu.problems.filter((problem) => problem.includes(gpu.uuid) || gpu.problems.length === 1);
  const sentences = gpu.state === "leased" ? (gpu.activity === "conflict" ? [gpu.reason] : own) : [gpu.reason];
  const reasons = sentences.filter(Boolean).map((text) => element("li", { class: "why", text: plain(text, 300) }));
  const drawn = gpu.processes.slice(0, MAX_PROCESSES).map(processLine);
  const hidden = gpu.processes.length - drawn.length;
  if (hidden > 0) drawn.push(element("li", { text: `… and ${hidden} more` }));
  return [...reasons, ...drawn];
}

function processLine(process) {
  const memory = process.memory_bytes === null ? "? GiB" : `${gibibytes(process.memory_bytes)} GiB`;
  const facts = [`pid ${process.pid}`, plain(process.user ?? "?"), memory, process.bystander && "bystander"];
  const line = element("li", { class: "process" }, element("span", { text: facts.filter(Boolean).join(" · ") }));
  if (process.command) {
    line.append(" ", element("code", { text: plain(process.command, 60), title: plain(process.command, 200) }));
  }
  return line;
}

/** Show the whole UUID, and copy it if the browser allows that (not over plain HTTP from another host). */
async function copy(button, uuid) {
  setText(button, plain(uuid));
  try {
    await navigator.clipboard.writeText(uuid);
    button.title = "Copied";
  } catch {
    button.title = plain(uuid);
  }
}
