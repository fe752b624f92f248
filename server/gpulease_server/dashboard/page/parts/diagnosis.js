// What a reader would see in the plots of a job: a rank that is slower than the others, and times when all ranks wait.
// Pure.

import { duration } from "../format.js";

const WINDOW_S = 900;
const LEAST_S = 8; // of readings, before anything is said
const BUSY = 0.3;
const STRAGGLES = 0.8; // of the others' utilization
const WAITS = 0.15;
const STALLS_PER_MINUTE_S = 3;
const STOPPED_S = 60;

/** @typedef {{ kind: "straggler" | "stall" | "stopped", label: string, text: string }} Finding */

/** Findings about GPUs with `label`, `start_at`, `seconds` and `utilization_ratio.mean`. @returns {Finding[]} */
export function diagnose(gpus) {
  const buckets = commonBuckets(gpus);
  return [...stragglers(gpus, buckets), ...stalls(gpus, buckets)];
}

/** The last quarter of an hour: how long each bucket is, and the utilization of each GPU; only where all are known. */
function commonBuckets(gpus) {
  if (!gpus.length) return [];
  const byTime = gpus.map(
    (gpu) => new Map(gpu.start_at.map((at, index) => [Date.parse(at), gpu.utilization_ratio.mean[index]])),
  );
  const [first] = gpus;
  const lastMs = Date.parse(first.start_at.at(-1) ?? "");
  return first.start_at
    .map((at, index) => ({ ms: Date.parse(at), seconds: first.seconds[index] }))
    .filter(({ ms }) => lastMs - ms <= 1000 * WINDOW_S)
    .map(({ ms, seconds }) => ({ seconds, ratios: byTime.map((ratios) => ratios.get(ms) ?? null) }))
    .filter(({ ratios }) => !ratios.includes(null));
}

function stragglers(gpus, buckets) {
  if (gpus.length < 2) return [];
  return gpus.flatMap(({ label }, own) => {
    let [seconds, work, workOfOthers] = [0, 0, 0];
    for (const bucket of buckets) {
      const others = median(bucket.ratios.filter((_, at) => at !== own));
      if (others < BUSY) continue;
      seconds += bucket.seconds;
      work += bucket.ratios[own] * bucket.seconds;
      workOfOthers += others * bucket.seconds;
    }
    if (seconds < LEAST_S || work > STRAGGLES * workOfOthers) return [];
    const share = Math.round((100 * work) / workOfOthers);
    return [
      { kind: "straggler", label, text: `${label} at ${share} % of the others' utilization for ${duration(seconds)}` },
    ];
  });
}

function stalls(gpus, buckets) {
  const waits = buckets.map(({ ratios }) => Math.max(...ratios) <= WAITS);
  const [from, to] = [waits.indexOf(false), waits.lastIndexOf(false)];
  if (from < 0) return [];
  const found = [];
  const between = buckets.slice(from, to + 1);
  const seconds = sum(between.map((bucket) => bucket.seconds));
  const waited = between.filter((_, at) => waits[from + at]);
  const times = waits.slice(from, to + 1).filter((wait, at, all) => wait && !all[at - 1]).length;
  const perMinute = Math.round((60 * sum(waited.map((bucket) => bucket.seconds))) / seconds);
  const everyone = gpus.length > 1 ? "all ranks" : gpus[0].label;
  if (times >= 2 && seconds >= LEAST_S && perMinute >= STALLS_PER_MINUTE_S) {
    const level = Math.round(100 * (sum(waited.map(({ ratios }) => sum(ratios) / ratios.length)) / waited.length));
    found.push({
      kind: "stall",
      label: everyone,
      text: `${everyone} at ${level} %: ${perMinute} s of each minute, as when they wait for data`,
    });
  }
  const sinceS = sum(buckets.slice(to + 1).map((bucket) => bucket.seconds));
  if (sinceS >= STOPPED_S)
    found.push({
      kind: "stopped",
      label: everyone,
      text: `no work on ${everyone === "all ranks" ? "any rank" : everyone} for ${duration(sinceS)}`,
    });
  return found;
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

function median(numbers) {
  const ordered = numbers.toSorted((one, other) => one - other);
  return (ordered[Math.floor((ordered.length - 1) / 2)] + ordered[Math.ceil((ordered.length - 1) / 2)]) / 2;
}
