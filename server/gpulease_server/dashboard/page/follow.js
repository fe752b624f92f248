// When to fetch what: everything at the start, what an event concerns when it arrives, readings every few seconds. With
// back-off while the daemon does not answer; nothing while the page is hidden.

import { asProblem, items, json, Pages, token } from "./api.js";
import { realMs } from "./clock.js";
import { readSharedEvents } from "./shared_stream.js";

const READINGS_MS = 3000;
const EVERYTHING_MS = 9000;
const UNTOLD_MS = 60_000; // lists of whose changes events tell, while there is a stream
const HISTORY_MS = 60_000; // a point of it is a minute
const ENDS_SOON_MS = 45_000; // a lease with less time left may have been renewed: that is no event
const LEAST_MS = 1000; // between two rounds, on average
const QUICK_ROUNDS = 6; // that may come sooner, so that a grant is seen at once although something else has just happened
const IDLE_SHARE = 4; // slow rounds count as several: all take at most a fifth of the time
const BACK_OFF_MS = [1000, 2000, 4000, 8000, 15_000];
export const MAX_EVENTS = 100;
const MAX_JOBS = 200; // as many as are drawn
const JOBS = 50; // on a page: each has its whole command

const ENDED = "state=succeeded&state=failed&state=cancelled&state=timed_out&state=lost";
const WORKING = "state=starting&state=running&state=stopping";
// Lists are newest first. All leases are fetched: the oldest is first in the queue, and any may hold a GPU that is
// drawn. Running jobs are fetched separately from queued ones, which are newer and may be thousands.
const QUERIES = {
  gpus: { path: "v1/gpus" },
  nodes: { path: "v1/nodes" },
  active: { path: "v1/leases?state=active", most: 4000, size: 1000 },
  queued: { path: "v1/leases?state=queued", most: 8000, size: 1000 },
  ended: { path: "v1/leases?state=ended", most: 100, size: 100 }, // only for the users of recent events
  waiting: { path: "v1/jobs?state=queued", most: MAX_JOBS, size: JOBS },
  working: { path: `v1/jobs?${WORKING}`, most: MAX_JOBS, size: JOBS },
  over: { path: `v1/jobs?${ENDED}`, most: 50, size: 50 },
};
export const LISTS = Object.keys(QUERIES);
const EVENTS = "events";
const ME = "me";
const HISTORY = "history";
const INDEX = "index"; // has the version of the daemon
// older daemons do not have them
const ALONE = { [ME]: "v1/me", [HISTORY]: "v1/gpus/history?last_s=3600&points=60", [INDEX]: "v1" };
const ALL = [...LISTS, EVENTS, ME, HISTORY, INDEX];
const READINGS = ["gpus"];
const HARDWARE = [...READINGS, "nodes"];
const GRANTS = ["active", "queued"];
const UNTOLD = [...HARDWARE, "active"]; // changes of these need not be events
const NEVER = { readings: 0, untold: 0, everything: 0, history: 0 };
const REFUSALS = [429, 503]; // earlier answers are still valid
const CONCERNED = {
  gpu: HARDWARE,
  node: HARDWARE,
  lease: ["gpus", "active", "queued"],
  job: ["gpus", "active", "queued", "ended", "waiting", "working", "over"],
};

/** What windows of the same page and the same user share. */
function streamName() {
  let hash = 0;
  for (const letter of token()) hash = (Math.imul(hash, 31) + (letter.codePointAt(0) ?? 0)) | 0;
  return `gpulease-events ${document.baseURI.split("#")[0]} ${hash}`;
}

/** Keeps `data` current. Callbacks: `drawn()`, `current(standby, asOfMs)`, `failed(problem)`, `refused(problem)`. */
export class Follow {
  constructor(data, callbacks) {
    this.data = data;
    this.callbacks = callbacks;
    this.wanted = new Set();
    this.failures = 0;
    this.lookedMs = 0;
    this.nextMs = 0;
    this.requestedMs = { ...NEVER };
    this.quick = QUICK_ROUNDS; // those that are left, as of quickMs
    this.quickMs = 0;
    this.streaming = false; // events tell what changes
    this.hidden = false;
    this.oneByOne = false; // since the daemon refused requests that came at once
    this.absent = new Set(); // what this daemon does not have
    this.timer = null;
    this.fetching = false;
    this.lastId = null;
    this.recalled = false; // the events before the stream have been fetched
    this.begun = new Map(); // name -> the pages that arrived before one was refused
    this.over = null; // aborts the stream; null while stopped
  }

  /** Start, or continue after `stop` or `onlyGrants`. */
  start() {
    this.hidden = false;
    if (this.over !== null) return this.want(...ALL);
    this.over = new AbortController();
    this.failures = 0;
    this.nextMs = 0;
    this.begun.clear();
    this.absent.clear();
    this.want(...ALL);
    this.listen(this.over.signal);
  }

  /** Keep the event stream, and fetch leases when one is granted or ends: for a page that is hidden. */
  onlyGrants() {
    this.hidden = true;
  }

  /** Fetch nothing any more. */
  stop() {
    this.over?.abort();
    this.over = null;
    this.streaming = false;
    clearTimeout(this.timer ?? undefined);
    this.timer = null;
  }

  /** Start again as another user, who may see other events. */
  restart() {
    this.stop();
    this.forgetPosition();
    this.start();
  }

  /** Called every second: readings grow old, and not every change is an event. */
  look() {
    const now = Date.now();
    if (now < this.lookedMs) {
      this.forgetTimes();
      this.hurry();
    }
    this.lookedMs = now;
    if (this.over === null || this.failures > 0 || !LISTS.every((name) => name in this.data)) return;
    const everythingMs = this.streaming ? UNTOLD_MS : EVERYTHING_MS;
    if (now - this.requestedMs.everything >= everythingMs) this.want(...LISTS);
    else if (now - this.requestedMs.untold >= EVERYTHING_MS && this.mayHaveChanged()) this.want(...UNTOLD);
    else if (now - this.requestedMs.readings >= READINGS_MS) this.want(...READINGS);
    if (now - this.requestedMs.history >= HISTORY_MS) this.want(HISTORY, INDEX);
  }

  /** Begin without times of before: by a clock that was set back they are in the future. */
  forgetTimes() {
    this.nextMs = 0;
    this.requestedMs = { ...NEVER };
    this.quick = QUICK_ROUNDS;
    this.quickMs = Date.now();
  }

  /** Whether a lease may have been renewed, or a node may be silent: no event tells that. */
  mayHaveChanged() {
    const soon = ({ expires_at: at }) => at !== null && Date.parse(at) - realMs() < ENDS_SOON_MS;
    const nodes = new Set(this.data.nodes.items.filter(({ state }) => state !== "unknown").map(({ name }) => name));
    const silent = ({ node, state }) => (state === "unknown") === nodes.has(node);
    return !this.streaming || this.data.active.items.some(soon) || this.data.gpus.items.some(silent);
  }

  /** Fetch at once, even during back-off. */
  hurry() {
    this.nextMs = 0;
    clearTimeout(this.timer ?? undefined);
    this.timer = null;
    this.want(...LISTS);
  }

  /** Fetch this in the next round. */
  want(...names) {
    for (const name of names) if (!this.hidden || GRANTS.includes(name)) this.wanted.add(name);
    if (this.wanted.size === 0 || this.over === null || this.fetching || this.timer !== null) return;
    this.timer = setTimeout(() => this.round(), Math.max(0, this.nextMs - Date.now()));
  }

  async round() {
    if (this.over === null) return;
    const { signal } = this.over;
    const begunMs = Date.now();
    const names = ALL.filter((name) => this.wanted.has(name) && !this.absent.has(name));
    this.timer = null;
    this.fetching = true;
    this.advanced = false;
    this.wanted.clear();
    if (READINGS.every((name) => names.includes(name))) this.requestedMs.readings = begunMs;
    if (UNTOLD.every((name) => names.includes(name))) this.requestedMs.untold = begunMs;
    if (LISTS.every((name) => names.includes(name))) this.requestedMs.everything = begunMs;
    if (names.includes(HISTORY)) this.requestedMs.history = begunMs;
    try {
      const found = this.oneByOne ? await this.fetchInTurn(names, signal) : await this.fetchAtOnce(names, signal);
      if (signal.aborted) return;
      this.failures = 0;
      this.nextMs = Date.now() + this.pauseMs(Date.now() - begunMs);
      if (found) this.callbacks.current(found.standby, found.asOfMs);
    } catch (error) {
      if (!signal.aborted) this.failed(asProblem(error), names);
    } finally {
      this.fetching = false;
      if (this.wanted.size) this.want();
      this.callbacks.drawn();
    }
  }

  /** The least time until the next round, after one that took so long. */
  pauseMs(tookMs) {
    const now = Date.now();
    this.quick = Math.min(QUICK_ROUNDS, this.quick + (now - this.quickMs) / LEAST_MS);
    this.quickMs = now;
    this.quick -= Math.max(1, (IDLE_SHARE * tookMs) / LEAST_MS);
    return Math.max(0, -this.quick * LEAST_MS);
  }

  /** Fetch each of these; what has arrived is taken out of `names`. Returns the answer that says how current they are. */
  async fetchAtOnce(names, signal) {
    /** @type {any[]} */
    const settled = await Promise.allSettled(names.map((name) => this.fetch(name, signal)));
    const refusals = settled.filter(({ status }) => status === "rejected").map(({ reason }) => asProblem(reason));
    const missing = names.filter((_, at) => settled[at].status === "rejected");
    names.splice(0, names.length, ...missing);
    if (refusals.length) throw refusals.find(({ status }) => status === 401) ?? refusals[0];
    return settled.map(({ value }) => value).find((value) => value);
  }

  /** As `fetchAtOnce`, one after the other: for a daemon that allows few requests in a second. */
  async fetchInTurn(names, signal) {
    let found;
    while (names.length) {
      found = (await this.fetch(names[0], signal)) ?? found;
      if (signal.aborted) return found;
      names.shift();
    }
    return found;
  }

  /** Fetch one list and keep it. Returns it, with how current it is. */
  async fetch(name, signal) {
    if (name === EVENTS) return this.recall(signal);
    if (name in ALONE) return this.fetchAlone(name, signal);
    const found = await this.pages(name, signal);
    if (!signal.aborted) this.data[name] = { items: found.items, more: found.more ?? false };
    this.advanced = true;
    return found;
  }

  /** What is no list; null where this daemon does not have it. */
  async fetchAlone(name, signal) {
    try {
      const found = await json(ALONE[name], signal);
      if (!signal.aborted) this.data[name] = found.value;
      return found;
    } catch (error) {
      if (name === INDEX) return null; // a proxy may not let it through, and the page is current without it
      if (![404, 422].includes(error.status)) throw error; // 422: it takes the name of what it lacks for an id
      this.absent.add(name);
      return null;
    }
  }

  async pages(name, signal) {
    const { path, most, size } = QUERIES[name];
    if (!size) return items(path, signal);
    const pages = this.begun.get(name) ?? new Pages(path, most, size);
    const before = pages.items.length;
    this.begun.set(name, pages);
    try {
      const found = await pages.rest(signal);
      if (!signal.aborted) this.begun.delete(name);
      return found;
    } finally {
      if (pages.items.length > before) this.advanced = true;
    }
  }

  failed(problem, unanswered) {
    if (problem.status === 401) {
      this.stop();
      this.callbacks.refused(problem);
      return;
    }
    const refused = REFUSALS.includes(problem.status);
    this.oneByOne ||= refused;
    if (refused && this.advanced) this.failures = 0; // a rate-limited page makes progress with each attempt
    const waitMs = BACK_OFF_MS[Math.min(this.failures, BACK_OFF_MS.length - 1)];
    this.failures += 1;
    this.nextMs = Date.now() + Math.max(waitMs, 1000 * (problem.retryAfterS ?? 0));
    // After a refusal only what is missing is fetched; after an outage much may have changed.
    if (!refused) this.begun.clear();
    for (const name of refused ? unanswered : [...LISTS, ...unanswered]) this.wanted.add(name);
    this.callbacks.failed(problem);
  }

  /** Follow the events, and open the stream again whenever it ends. While there is none, pages are fetched. */
  async listen(signal) {
    let failures = 0;
    while (!signal.aborted) {
      let waitMs = BACK_OFF_MS[Math.min(failures, BACK_OFF_MS.length - 1)];
      failures += 1;
      let problem = null;
      try {
        await readSharedEvents(
          streamName(),
          () => this.lastId,
          signal,
          (id) => {
            failures = 0;
            if (!signal.aborted) this.reached(id);
          },
          (kind, data) => {
            if (!signal.aborted) this.happened(kind, data);
          },
        );
      } catch (error) {
        problem = asProblem(error);
        waitMs = Math.max(waitMs, 1000 * (problem.retryAfterS ?? 0));
      }
      if (signal.aborted) return;
      this.streaming = false;
      if (problem?.status === 410) this.forgetPosition();
      if (problem?.status !== 429) this.want(...LISTS); // shows whether the daemon is away
      if (problem !== null) this.want(EVENTS);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  /** The stream is at this event. Those before it are fetched once, and again where the stream does not continue; so is what
   * they may have changed between the answer that is shown and the stream. */
  reached(id) {
    if (Number(id) < Number(this.lastId)) this.forgetPosition(); // of an older database; another window was told so
    const begins = this.lastId === null;
    this.lastId = id;
    this.streaming = true;
    if (begins || !this.recalled) this.want(EVENTS, ...LISTS);
  }

  /** The stream cannot continue where it was: the database may be another one, with other events of the same numbers. */
  forgetPosition() {
    this.lastId = null;
    this.recalled = false;
    this.begun.delete(EVENTS);
    this.data.events = [];
  }

  /** The last events, as a page. Where they begin is kept if the page itself is refused. */
  async recall(signal) {
    if (!this.begun.has(EVENTS)) {
      const { value: kept } = await items("v1/events?after=0&limit=1", signal);
      this.begun.set(EVENTS, Math.max(0, kept.pruned_seq, kept.last_seq - MAX_EVENTS));
      this.advanced = true;
    }
    const found = await items(`v1/events?after=${this.begun.get(EVENTS)}&limit=${MAX_EVENTS}`, signal);
    if (signal.aborted) return found;
    this.begun.delete(EVENTS);
    this.remember(found.items);
    this.recalled = true;
    return found;
  }

  happened(kind, data) {
    if (kind === "events_pruned") {
      this.forgetPosition();
      return;
    }
    const event = JSON.parse(data);
    this.remember([event]);
    this.want(...(CONCERNED[event.kind.split(".")[0]] ?? LISTS));
    if (event.kind === "lease.ended") this.want("ended"); // its user is named with it
  }

  remember(events) {
    const bySeq = new Map([...this.data.events, ...events].map((event) => [event.seq, event]));
    this.data.events = [...bySeq.values()].sort((one, other) => other.seq - one.seq).slice(0, MAX_EVENTS);
    this.callbacks.drawn();
  }
}
