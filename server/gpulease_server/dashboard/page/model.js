// What the lists of the API say together. Pure: every view draws what these functions return.

import { duration, plain, places, short, who } from "./format.js";

/**
 * @typedef {import("./vendor/openapi.js").components["schemas"]} Schemas
 * @typedef {Schemas["Gpu"]} Gpu
 * @typedef {Schemas["Lease"]} Lease
 * @typedef {Schemas["Job"]} Job
 * @typedef {Schemas["Event"]} Event
 * @typedef {Schemas["Node"]} Node
 * @typedef {Schemas["Holder"]} Holder
 */
/**
 * @template T
 * @typedef {{ items: T[], more: boolean }} List What was fetched; `more`: there are others.
 */
/**
 * @typedef {{ gpus: List<Gpu>, nodes: List<Node>, active: List<Lease>, queued: List<Lease>, ended: List<Lease>, waiting: List<Job>,
 *   working: List<Job>, over: List<Job>, events: Event[], me: Schemas["Identity"] | null,
 *   history: { gpus: { uuid: string, utilization_ratio: (number | null)[] | null }[] } | null }} Data
 */

export const IDLE_SHOWN_S = 60;
export const IDLE_ALARM_S = 600;
const HUES = 8;
const ONE_CAUSE_MS = 10_000; // what a timer causes has the same cause an hour later
const STATES = [
  "free",
  "held",
  "leased",
  "idle",
  "draining",
  "foreign",
  "conflict",
  "cordoned",
  "prohibited",
  "unhealthy",
  "unknown",
];
const ALARMS = ["unhealthy", "conflict", "foreign"];
const PROBLEM =
  /conflict|unhealthy|failed|lost|revoked|died|foreign|timed.out|unknown|exited with code (?!0\b)|signal/i;
const JOB_ORDER = ["running", "starting", "stopping", "queued"];
/** The place of a job that waits for other jobs, and joins the queue at its end. */
const LAST = 1e9;

/** @type {Map<string, number>} The hue of each user who was drawn since the page was opened. */
const hues = new Map();
const MOST_USERS = 1000;

/**
 * Give users hues, each one of their own while there are any: who has one keeps it, others get that of their name, else the next.
 * The first of these users come first. @param {string[]} users
 */
export function colourUsers(users) {
  if (hues.size > MOST_USERS) hues.clear();
  const taken = new Set();
  const keeps = new Set(
    users.filter((user) => hues.has(user) && !taken.has(hues.get(user)) && taken.add(hues.get(user))),
  );
  for (const user of users.filter((one) => !keeps.has(one))) {
    const hue = freeHue(user, taken);
    hues.set(user, hue);
    taken.add(hue);
  }
}

/** That of the user's name, or the next that is not taken; where all are, that of the name. @param {string} user @param {Set<number>} taken */
function freeHue(user, taken) {
  let hash = 0x811c9dc5;
  for (const letter of user) hash = Math.imul(hash ^ (letter.codePointAt(0) ?? 0), 0x01000193);
  const own = ((hash ^ (hash >>> 15)) >>> 0) % HUES;
  for (let step = 0; step < HUES; step += 1) if (!taken.has((own + step) % HUES)) return (own + step) % HUES;
  return own;
}

/** The hue of a user, 0 to 7, and never that of a state. @param {string} user */
export function hueOf(user) {
  if (!hues.has(user)) hues.set(user, freeHue(user, new Set(hues.values())));
  return hues.get(user) ?? 0;
}

/** Whose colours have to differ first: those who hold GPUs, then those who wait, each by name. @param {Data} data */
export function presentUsers(data) {
  const names = ({ items }) =>
    items
      .map(({ holder }) => userOf(holder))
      .filter(Boolean)
      .sort();
  return [...new Set([...names(data.active), ...names(data.queued)])];
}

/** The name by which a holder is coloured and called. @param {Holder | null} holder */
export function userOf(holder) {
  return holder?.user || holder?.host || "";
}

/** A GPU's state in a word, with a key for its shape and colour, and for how long it has been idle. @param {Gpu} gpu @param {number} nowMs @returns {{ key: string, word: string, idleS?: number }} */
export function stateOf(gpu, nowMs) {
  if (gpu.state === "free" && gpu.reason) return { key: "held", word: "held" };
  if (gpu.state !== "leased") return { key: gpu.state, word: gpu.state };
  if (gpu.activity === "conflict") return { key: "conflict", word: "conflict" };
  if (gpu.activity !== "idle" && gpu.activity !== "starting") return { key: "leased", word: gpu.activity ?? "leased" };
  const idleS =
    gpu.last_busy_at === null || gpu.last_busy_at === undefined ? 0 : (nowMs - Date.parse(gpu.last_busy_at)) / 1000;
  const word = gpu.activity === "starting" ? "unused" : "idle";
  if (idleS < IDLE_SHOWN_S) return { key: word === "idle" ? "idle" : "leased", word, idleS };
  return { key: idleS < IDLE_ALARM_S ? "leased" : "idle", word: `idle ${duration(idleS).split(" ")[0]}`, idleS };
}

/** Everything that is drawn of a GPU. @param {Gpu} gpu @param {Lease | undefined} lease @param {Job | undefined} job @param {number} nowMs */
function gpuView(gpu, lease, job, nowMs) {
  const state = stateOf(gpu, nowMs);
  const stranger = gpu.processes.find((process) => process.lease_id === null && !process.bystander);
  const user = userOf(gpu.holder) || (state.key === "foreign" ? (stranger?.user ?? "") : "");
  return {
    ...gpu,
    stateKey: state.key,
    word: state.word,
    idleS: state.idleS ?? 0,
    lease: lease ?? null,
    job: job ?? null,
    user,
  };
}

/** When a lease ends, in words: a watched process renews it while it lives. `brief`: without the process where a time is known. @param {Lease | null} lease @param {number} nowMs @param {boolean} brief */
export function until(lease, nowMs, brief = false) {
  if (lease?.state !== "active") return "";
  const left = (at) => duration((Date.parse(at) - nowMs) / 1000);
  if (lease.preempt_at) return `preempted in ${left(lease.preempt_at)}`;
  if (lease.reclaim_at) return `taken back in ${left(lease.reclaim_at)}`;
  const endsAt = lease.ends_at ?? "";
  const most = endsAt && `at most ${left(endsAt)}`;
  if (lease.liveness === "process" && lease.holder.owner_pid)
    return [!(brief && most) && `while pid ${lease.holder.owner_pid} runs`, most].filter(Boolean).join(", ");
  if (lease.expires_at === null || (most && Date.parse(endsAt) <= Date.parse(lease.expires_at))) return most;
  return `in ${left(lease.expires_at)}`;
}

/** How often a job was preempted, in words; empty if never. @param {Job | null} job */
export function preemptedTimes(job) {
  const times = job?.preempted ?? 0;
  return times ? `preempted ${times === 1 ? "once" : `${times} times`}` : "";
}

/** The jobs that wait or run, by lease. @param {Data} data */
export function jobsByLease(data) {
  return new Map([...data.waiting.items, ...data.working.items].map((job) => [job.lease_id, job]));
}

/** The nodes with their GPUs, in order; only the GPUs that match `q`. @param {Data} data @param {string} q @param {number} nowMs */
export function nodeViews(data, q, nowMs) {
  const leases = new Map(data.active.items.map((lease) => [lease.id, lease]));
  const jobs = jobsByLease(data);
  /** @type {Map<string, any>} */
  const nodes = new Map(data.nodes.items.map((node) => [node.name, { ...node, gpus: [] }]));
  for (const gpu of data.gpus.items) {
    if (!nodes.has(gpu.node)) nodes.set(gpu.node, { name: gpu.node, state: "ready", mode: "active", gpus: [] });
    nodes.get(gpu.node).gpus.push(gpuView(gpu, leases.get(gpu.lease_id ?? ""), jobs.get(gpu.lease_id ?? ""), nowMs));
  }
  const views = [...nodes.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  for (const view of views) {
    view.models = modelsOf(view.gpus);
    view.count = view.gpus.length;
    view.everyGpu = view.gpus;
    view.gpus = view.gpus.filter((gpu) => matches(q, gpuWords(gpu))).sort((one, other) => one.index - other.index);
  }
  return q ? views.filter((view) => view.gpus.length) : views;
}

function gpuWords(gpu) {
  const processes = gpu.processes.flatMap((process) => [process.user, process.command]);
  const job = gpu.job ? [gpu.job.name, gpu.job.id] : [];
  return [
    `gpu ${gpu.index}`,
    gpu.uuid,
    gpu.node,
    gpu.name,
    gpu.user,
    gpu.holder?.label,
    gpu.lease_id,
    gpu.word,
    ...job,
    ...processes,
  ];
}

/** The product names of GPUs with their number: 8 × H100 80GB. */
function modelsOf(gpus) {
  const counts = new Map();
  for (const gpu of gpus) counts.set(modelOf(gpu), (counts.get(modelOf(gpu)) ?? 0) + 1);
  return [...counts].map(([name, count]) => ({ name, count }));
}

/** A product name without what all have in common. */
export function modelOf(gpu) {
  return plain((gpu.name ?? "?").replace(/^(NVIDIA |Tesla |GeForce )+| HBM\d\w*$| Generation$/g, ""));
}

/** The requests that wait, in order, with their jobs; only those that match `q`. @param {Data} data @param {string} q */
export function queueViews(data, q) {
  const jobs = jobsByLease(data);
  return data.queued.items
    .toSorted((one, other) => (one.position ?? LAST) - (other.position ?? LAST))
    .map((lease) => ({ ...lease, job: jobs.get(lease.id) ?? null }))
    .filter((lease) =>
      matches(q, [lease.id, userOf(lease.holder), lease.holder.label, lease.job?.name, lease.job?.id]),
    );
}

/** Every job once: one that changed its state between two answers is in both, and the later one counts. @param {Data} data @param {string} q */
export function jobViews(data, q) {
  const all = [...data.waiting.items, ...data.working.items, ...data.over.items];
  const place = ({ state }) => (JOB_ORDER.includes(state) ? JOB_ORDER.indexOf(state) : JOB_ORDER.length);
  return [...new Map(all.map((job) => [job.id, job])).values()]
    .sort((one, other) => place(one) - place(other))
    .filter((job) =>
      matches(q, [job.id, job.name, job.user, job.state, job.reason, ...job.gpus.map((gpu) => gpu.node)]),
    );
}

/** What a job is called. @param {Job} job */
export function jobName(job) {
  const index = job.array_index === null || job.array_index === undefined ? "" : `[${job.array_index}]`;
  return job.name ? plain(job.name) + index : job.id + index;
}

/** The events with their places and people; only those that match `q`. @param {Data} data @param {string} q */
export function eventViews(data, q) {
  const devices = new Map(data.gpus.items.map((gpu) => [gpu.uuid, gpu]));
  const holders = new Map();
  for (const lease of [...data.ended.items, ...data.queued.items, ...data.active.items])
    holders.set(lease.id, lease.holder);
  const names = new Map(
    [...data.over.items, ...data.waiting.items, ...data.working.items].map((job) => [job.id, jobName(job)]),
  );
  return data.events
    .map((event) => ({
      ...event,
      ...eventPlace(event, devices),
      holder: holders.get(event.lease_id ?? "") ?? null,
      job: names.get(event.job_id ?? "") ?? "",
    }))
    .filter((event) =>
      matches(q, [
        event.kind,
        event.lease_id,
        event.job_id,
        event.job,
        event.where,
        event.reason,
        event.holder && who(event.holder),
      ]),
    );
}

/** The same events, those of one cause within some seconds below the first of them; the others `follow`. @param {any[]} events */
export function groupedByCause(events) {
  const groups = [];
  const latest = new Map();
  for (const event of events) {
    const group = event.cause ? latest.get(event.cause) : undefined;
    if (group && Math.abs(Date.parse(group[0].at) - Date.parse(event.at)) <= ONE_CAUSE_MS) {
      group.push(event);
      continue;
    }
    groups.push([event]);
    latest.set(event.cause, groups.at(-1));
  }
  return groups.flatMap((group) => group.map((event, at) => ({ ...event, follows: at > 0 })));
}

/** Where an event happened, and whether it is a problem. @param {Event} event @param {Map<string, Gpu>} devices */
export function eventPlace(event, devices) {
  const known = event.gpus.map((uuid) => devices.get(uuid)).filter(Boolean);
  const where = known.length ? `GPU ${places(known, true)}` : event.node ? `node ${plain(event.node)}` : "";
  return {
    where,
    problem: PROBLEM.test(`${event.kind} ${event.reason ?? ""}`),
  };
}

/** What is wrong now, each with a link: GPUs that are unhealthy, in conflict or used by others, and nodes that are silent. @param {Data} data @param {number} nowMs */
export function problems(data, nowMs) {
  const found = [];
  const several = data.nodes.items.length > 1;
  for (const node of data.nodes.items) {
    if (node.state === "unknown") {
      found.push({
        key: node.name,
        state: "unknown",
        view: "now",
        id: "",
        query: { q: node.name },
        text: `Node ${plain(node.name)} is unknown: ${plain(node.reason ?? "no reading", 200)}`,
      });
    }
  }
  for (const gpu of data.gpus.items) {
    const { key } = stateOf(gpu, nowMs);
    if (!ALARMS.includes(key)) continue;
    const place = `GPU ${gpu.index}${several ? ` of ${plain(gpu.node)}` : ""}`;
    const why =
      key === "unhealthy"
        ? plain(gpu.health === "ok" ? (gpu.reason ?? "") : gpu.health, 100)
        : plain(gpu.reason ?? "", 200);
    found.push({
      key: gpu.uuid,
      state: key,
      view: "gpus",
      id: gpu.uuid,
      query: {},
      text: `${place} ${key}${why ? `: ${why}` : ""}`,
    });
  }
  return found;
}

/** How many GPUs are in each state, in the order of STATES; "free" only those that anyone may get. @param {Data} data @param {number} nowMs */
export function totals(data, nowMs) {
  const counts = new Map();
  for (const gpu of data.gpus.items) {
    const { key } = stateOf(gpu, nowMs);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return STATES.filter((key) => key === "free" || counts.has(key)).map((key) => ({ key, count: counts.get(key) ?? 0 }));
}

/** The last hour of each GPU, by UUID; empty where the daemon keeps none. @param {Data} data */
export function historyByGpu(data) {
  return new Map((data.history?.gpus ?? []).map((gpu) => [gpu.uuid, gpu.utilization_ratio ?? []]));
}

/** True if every word of `q` is in one of these texts. */
export function matches(q, texts) {
  if (!q) return true;
  const text = texts.filter(Boolean).join("\n").toLowerCase();
  return q
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/** A GPU in a few words, by UUID: its index, with its node where there are several. @param {Data} data @returns {(uuid: string) => string} */
export function gpuNames(data) {
  const several = data.nodes.items.length > 1;
  const names = new Map(
    data.gpus.items.map((gpu) => [gpu.uuid, `${gpu.index}${several ? ` of ${plain(gpu.node)}` : ""}`]),
  );
  return (uuid) => names.get(uuid) ?? short(uuid);
}
