// What is asked when: everything at the start, what an event concerns when it comes, readings every few seconds; and
// when the daemon does not answer, again and again ever more slowly. Nothing while the page is hidden.

import { json, list, Problem } from "./api.js";
import { readEvents } from "./stream.js";

const READINGS_MS = 3000;
const EVERYTHING_MS = 9000;
const LEAST_MS = 1000; // between two rounds
const IDLE_SHARE = 4; // rounds that take long come less often: at most a fifth of the time is spent in them
const BACK_OFF_MS = [1000, 2000, 4000, 8000, 15_000];
export const MAX_EVENTS = 100;

const ENDED = "state=succeeded&state=failed&state=cancelled&state=timed_out&state=lost";
const LIVE = "state=queued&state=starting&state=running&state=stopping";
const QUESTIONS = {
  gpus: () => json("v1/gpus"),
  nodes: () => json("v1/nodes"),
  active: () => list("v1/leases?state=active", 4000),
  queued: () => list("v1/leases?state=queued", 8000),
  ended: () => list("v1/leases?state=ended", 100), // only for the users of jobs that have ended
  live: () => list(`v1/jobs?${LIVE}`, 2000),
  over: () => list(`v1/jobs?${ENDED}`, 50),
};
const READINGS = ["gpus", "nodes"];
const CONCERNED = {
  gpu: READINGS,
  node: READINGS,
  lease: ["gpus", "active", "queued"],
  job: ["gpus", "active", "queued", "live", "over", "ended"],
};

/** Keeps `seen` current. `told` has `drawn()`, `current(standby, asOfMs)`, `failed(problem)`, `refused(problem)`. */
export class Follow {
  constructor(seen, told) {
    this.seen = seen;
    this.told = told;
    this.wanted = new Set();
    this.failures = 0;
    this.nextMs = 0;
    this.askedMs = { readings: 0, everything: 0 };
    this.timer = null;
    this.asking = false;
    this.lastId = null;
    this.over = null; // ends the stream; null while nothing is followed
  }

  /** Begin, or go on after `stop`. */
  start() {
    if (this.over !== null) return;
    this.over = new AbortController();
    this.failures = 0;
    this.nextMs = 0;
    this.want(...Object.keys(QUESTIONS));
    this.listen(this.over.signal);
  }

  /** Ask for nothing any more. */
  stop() {
    this.over?.abort();
    this.over = null;
    clearTimeout(this.timer);
    this.timer = null;
  }

  /** Called every second: readings grow old, and not everything that changes is an event. */
  look() {
    if (this.over === null || this.failures > 0) return;
    const now = Date.now();
    if (now - this.askedMs.everything >= EVERYTHING_MS) this.want(...Object.keys(QUESTIONS));
    else if (now - this.askedMs.readings >= READINGS_MS) this.want(...READINGS);
  }

  /** Ask at once, where the next attempt was put off. */
  hurry() {
    this.nextMs = 0;
    clearTimeout(this.timer);
    this.timer = null;
    this.want(...Object.keys(QUESTIONS));
  }

  /** Have something asked in the next round. */
  want(...names) {
    for (const name of names) this.wanted.add(name);
    if (this.over === null || this.asking || this.timer !== null) return;
    this.timer = setTimeout(() => this.round(), Math.max(0, this.nextMs - Date.now()));
  }

  async round() {
    const { signal } = this.over;
    const begunMs = Date.now();
    const names = [...this.wanted];
    this.timer = null;
    this.asking = true;
    this.wanted.clear();
    if (READINGS.every((name) => names.includes(name))) this.askedMs.readings = begunMs;
    if (Object.keys(QUESTIONS).every((name) => names.includes(name))) this.askedMs.everything = begunMs;
    try {
      let found;
      while (names.length) {
        found = await QUESTIONS[names[0]]();
        if (signal.aborted) return;
        this.seen[names.shift()] = { items: found.items ?? found.value.items, more: found.more ?? false };
      }
      this.failures = 0;
      this.nextMs = Date.now() + Math.max(LEAST_MS, IDLE_SHARE * (Date.now() - begunMs));
      if (found) this.told.current(found.standby, found.asOfMs);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (!signal.aborted) this.failed(error, names);
    } finally {
      this.asking = false;
      this.told.drawn();
      if (this.wanted.size) this.want();
    }
  }

  failed(problem, unanswered) {
    if (problem.status === 401) {
      this.stop();
      this.told.refused(problem);
      return;
    }
    const waitMs = BACK_OFF_MS[Math.min(this.failures, BACK_OFF_MS.length - 1)];
    this.failures += 1;
    this.nextMs = Date.now() + Math.max(waitMs, 1000 * (problem.retryAfterS ?? 0));
    // Who asks too often gets on by asking only for what is missing; else much may have changed meanwhile.
    const missing = problem.status === 429 ? unanswered : Object.keys(QUESTIONS);
    for (const name of missing) this.wanted.add(name);
    this.told.failed(problem);
  }

  /** Follow the events, opening the stream again whenever it ends. */
  async listen(signal) {
    let failures = 0;
    while (!signal.aborted) {
      let waitMs = BACK_OFF_MS[Math.min(failures, BACK_OFF_MS.length - 1)];
      failures += 1;
      try {
        await readEvents(this.lastId, signal, (id) => {
          failures = 0;
          this.reached(id);
        }, (kind, data) => this.happened(kind, data));
      } catch (problem) {
        if (problem.status === 410) this.lastId = null;
        waitMs = Math.max(waitMs, 1000 * (problem.retryAfterS ?? 0));
        if (problem.status === 401) return; // the next round is told so, too
      }
      if (signal.aborted) return;
      this.want(...Object.keys(QUESTIONS)); // whether the daemon is away shows there
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  /** The stream is at this event. The first time, those before it are asked for. */
  reached(id) {
    const first = this.lastId === null;
    this.lastId = id;
    if (first) this.recall(Math.max(0, Number(id) - MAX_EVENTS));
  }

  async recall(after) {
    try {
      const { value } = await json(`v1/events?after=${after}&limit=${MAX_EVENTS}`);
      this.remember(value.items);
    } catch (problem) {
      const pruned = problem.said?.pruned_seq;
      if (problem.status === 410 && pruned > after) await this.recall(pruned);
      // Otherwise those that come are shown, and the earlier ones are missing.
    }
  }

  happened(kind, data) {
    if (kind === "events_pruned") {
      this.lastId = null;
      return;
    }
    const event = JSON.parse(data);
    this.remember([event]);
    this.want(...(CONCERNED[event.kind.split(".")[0]] ?? Object.keys(QUESTIONS)));
  }

  remember(events) {
    const bySeq = new Map([...this.seen.events, ...events].map((event) => [event.seq, event]));
    this.seen.events = [...bySeq.values()].sort((one, other) => other.seq - one.seq).slice(0, MAX_EVENTS);
    this.told.drawn();
  }
}
