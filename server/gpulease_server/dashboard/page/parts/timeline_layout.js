// Where everything of a timeline is: rows, bars and marks, in seconds since 1970 and in pixels. Pure.

import { plain } from "../format.js";
import { gpuNames, jobsByLease, jobName, matches, modelOf } from "../model.js";

/**
 * @typedef {import("../vendor/openapi.js").components["schemas"]} Schemas
 * @typedef {Schemas["Timeline"]} Timeline
 * @typedef {Schemas["Span"]} Span
 * @typedef {{ from: number, to: number, span: Span, open: boolean, text: string }} Bar A lease on one GPU; `open`: it goes on.
 * @typedef {{ from: number, to: number, kind: string, reason: string, open: boolean }} Band A time when a GPU was not to be used as usual.
 * @typedef {{ key: string, name: string, title: string, uuid: string, node: string, user: string, rows: number, bars: Bar[][], bands: Band[] }} Lane
 * A line of the timeline: a GPU, or a user with as many rows as they held GPUs at once. Bars of a row do not overlap, first first.
 */

const UNITS = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200];
const HOUR_S = 3600;
const DAY_S = 86_400;
const LABEL_PX = 90;
const LEAST_SPAN_S = 60;
const MOST_SPAN_S = 370 * DAY_S;
const MERGED_PX = 2;
const HEADING_PX = 24;
const USER_PX = 64;
const LEAST_USER_PX = 26;

/** The window of an address, and of a range that ends now. @returns {[number, number]} */
export function windowOf(zoom, rangeS, nowS) {
  return zoom ?? [nowS - rangeS, nowS + rangeS / 40];
}

/** A window `factor` times as long, with `anchorS` where it was; not after now by more than a tenth. @returns {[number, number]} */
export function zoomed([from, to], factor, anchorS, nowS) {
  const length = Math.min(MOST_SPAN_S, Math.max(LEAST_SPAN_S, (to - from) * factor));
  const begin = anchorS - ((anchorS - from) / (to - from)) * length;
  return moved([begin, begin + length], 0, nowS);
}

/** A window `seconds` later, as far as there is something to see. @returns {[number, number]} */
export function moved([from, to], seconds, nowS) {
  const length = to - from;
  const end = Math.min(to + seconds, nowS + length / 10);
  return [Math.round(end - length), Math.round(end)];
}

/** The period to ask for, which stays the same while a window moves a little: at least half of it more on both sides. @returns {[number, number]} */
export function askedPeriod([from, to]) {
  const grain = 2 ** Math.ceil(Math.log2(Math.max(LEAST_SPAN_S, to - from)));
  return [Math.floor((from - grain / 4) / grain) * grain, Math.ceil((to + grain / 4) / grain) * grain];
}

const seconds = (at) => Date.parse(at) / 1000;

/** The bars of each GPU, and their bands; only what matches `q`. @param {any} data @param {Timeline} timeline @param {string} q @param {number} nowS @returns {Lane[]} */
export function gpuLanes(data, timeline, q, nowS) {
  const nameOf = gpuNames(data);
  /** @type {Map<string, Lane>} */
  const lanes = new Map(
    timeline.gpus.map((gpu) => {
      const name = `GPU ${gpu.index ?? nameOf(gpu.uuid)}`;
      const title = [plain(gpu.node), modelOf(gpu), gpu.present ? "" : "gone"].filter(Boolean).join(", ");
      const lane = {
        key: gpu.uuid,
        name,
        title,
        uuid: gpu.uuid,
        node: gpu.node,
        user: "",
        rows: 1,
        bars: [[]],
        bands: [],
      };
      return [gpu.uuid, lane];
    }),
  );
  const shown = new Set([...lanes.values()].filter((lane) => matches(q, [lane.name, lane.uuid, lane.node])));
  const wordsOf = spanWords(data);
  for (const span of timeline.spans) {
    const matched = span.kind === "lease" && matches(q, wordsOf(span));
    for (const uuid of span.gpus) {
      const lane = lanes.get(uuid);
      if (!lane) continue;
      if (span.kind !== "lease") lane.bands.push(bandOf(span, timeline, nowS));
      else if (matched || shown.has(lane)) lane.bars[0].push(barOf(span, nowS, wordsOf));
      if (matched && q) shown.add(lane);
    }
  }
  const found = [...lanes.values()].filter((lane) => shown.has(lane));
  for (const lane of found) lane.bars[0].sort((one, other) => one.from - other.from);
  return found;
}

/** The bars of each user, each GPU of a lease in a row of its own; only what matches `q`. @param {any} data @param {Timeline} timeline @param {string} q @param {number} nowS @returns {Lane[]} */
export function userLanes(data, timeline, q, nowS) {
  /** @type {Map<string, Lane>} */
  const lanes = new Map();
  const wordsOf = spanWords(data);
  const leases = timeline.spans.filter((span) => span.kind === "lease" && matches(q, wordsOf(span)));
  for (const span of leases.sort((one, other) => seconds(one.from_at) - seconds(other.from_at))) {
    const user = span.user || "?";
    const lane = lanes.get(user) ?? {
      key: user,
      name: user,
      title: "",
      uuid: "",
      node: "",
      user,
      rows: 0,
      bars: [],
      bands: [],
    };
    lanes.set(user, lane);
    const bar = barOf(span, nowS, wordsOf);
    let row = 0;
    for (let placed = 0; placed < span.gpus.length; row += 1) {
      lane.bars[row] ??= [];
      const last = lane.bars[row].at(-1);
      if (last && last.to > bar.from) continue;
      lane.bars[row].push(bar);
      placed += 1;
    }
    lane.rows = lane.bars.length;
  }
  return [...lanes.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
}

/** What a span can be searched for, the name of its bar first. */
function spanWords(data) {
  const jobs = jobsByLease(data);
  for (const job of data.over.items) jobs.set(job.lease_id, job);
  return (span) => {
    const job = jobs.get(span.lease_id);
    return [job ? jobName(job) : plain(span.label), span.user, span.label, span.lease_id, span.job_id];
  };
}

function barOf(span, nowS, wordsOf) {
  const from = seconds(span.from_at);
  const open = span.to_at === null || span.to_at === undefined;
  const to = Math.max(from, open ? nowS : seconds(span.to_at));
  return { from, to, open, span, text: [span.user, wordsOf(span)[0]].filter(Boolean).join(" ") };
}

function bandOf(span, timeline, nowS) {
  const open = span.to_at === null || span.to_at === undefined;
  return {
    from: seconds(span.from_at ?? timeline.from_at),
    to: open ? nowS : seconds(span.to_at),
    kind: span.kind,
    reason: plain(span.reason ?? "", 200),
    open,
  };
}

/**
 * Those that are in the window, and of those that are too narrow to be seen only the first on its pixels.
 * @template {Bar | Band} T
 * @param {T[]} bars sorted
 * @param {[number, number]} window
 * @param {number} width
 * @returns {T[]}
 */
export function drawnBars(bars, [from, to], width) {
  const perPixel = (to - from) / width;
  const found = /** @type {T[]} */ ([]);
  let taken = -Infinity;
  for (const bar of bars) {
    if (bar.from > to) break;
    if (bar.to < from && !bar.open) continue;
    const narrow = !bar.open && bar.to - bar.from < MERGED_PX * perPixel;
    if (narrow && bar.to < taken) continue;
    found.push(bar);
    taken = narrow ? bar.from + MERGED_PX * perPixel : bar.to;
  }
  return found;
}

/** The places of times in a window that labels are for: whole minutes, hours or days of this browser's zone. @returns {{ at: number, text: string, day: boolean }[]} */
export function ticks([from, to], width) {
  const wanted = ((to - from) * LABEL_PX) / Math.max(LABEL_PX, width);
  const step = UNITS.find((unit) => unit >= wanted) ?? DAY_S * Math.ceil(wanted / DAY_S);
  const found = [];
  const day = new Date(1000 * from);
  day.setHours(0, 0, 0, 0);
  while (day.getTime() <= 1000 * to) {
    const next = new Date(day); // after 23 or 25 hours, where the clocks change
    next.setDate(day.getDate() + Math.max(1, step / DAY_S));
    for (let sinceS = 0, at = new Date(day); at < next; sinceS += step) {
      const atS = at.getTime() / 1000;
      if (atS >= from && atS <= to && found.at(-1)?.at !== atS) found.push(tickOf(atS));
      at = new Date(day);
      if (step < HOUR_S) at.setTime(day.getTime() + 1000 * (sinceS + step));
      else at.setHours((sinceS + step) / HOUR_S);
    }
    day.setTime(next.getTime());
  }
  return found;
}

function tickOf(at) {
  const moment = new Date(1000 * at);
  const day = moment.getHours() === 0 && moment.getMinutes() === 0;
  const text = day
    ? moment.toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" })
    : moment.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return { at, text, day };
}

/** A time when a GPU did nothing: the buckets of its history that are known and 0, as spans. @param {any} history @returns {Map<string, { from: number, to: number }[]>} */
export function idleSpans(history) {
  const found = new Map();
  if (!history) return found;
  const startS = seconds(history.from_at);
  const endS = seconds(history.to_at);
  for (const { uuid, utilization_ratio: ratios } of history.gpus) {
    const spans = [];
    (ratios ?? []).forEach((ratio, at) => {
      if (ratio !== 0) return;
      const from = startS + at * history.bucket_s;
      const to = Math.min(endS, from + history.bucket_s);
      if (spans.at(-1)?.to === from) spans.at(-1).to = to;
      else spans.push({ from, to });
    });
    found.set(uuid, spans);
  }
  return found;
}

/** The mean utilization of a lease's GPUs while it held them; null where nothing is known of it. @param {any} history @param {Bar} bar */
export function usedShare(history, bar) {
  if (!history) return null;
  const startS = seconds(history.from_at);
  const first = Math.max(0, Math.floor((bar.from - startS) / history.bucket_s));
  const last = Math.ceil((bar.to - startS) / history.bucket_s);
  let [sum, count] = [0, 0];
  for (const { uuid, utilization_ratio: ratios } of history.gpus) {
    if (!bar.span.gpus.includes(uuid)) continue;
    for (const ratio of (ratios ?? []).slice(first, last)) {
      if (ratio === null) continue;
      sum += ratio;
      count += 1;
    }
  }
  return count ? sum / count : null;
}

/** The leases of a window, the latest first. @param {Lane[]} lanes @param {[number, number]} window @returns {Bar[]} */
export function leasesIn(lanes, [from, to]) {
  const bars = new Map();
  for (const lane of lanes)
    for (const bar of lane.bars.flat()) if (bar.from <= to && bar.to >= from) bars.set(bar.span, bar);
  return [...bars.values()].sort((one, other) => other.from - one.from);
}

/** What identifies a bar: an elastic lease has several, of which some begin together on different GPUs. */
export function partOf({ span, from }) {
  return `${span.lease_id} ${from} ${span.gpus[0]}`;
}

/** Until when a bar is drawn: one that goes on, until now. */
export function endOf(bar, nowS) {
  return bar.open ? Math.max(bar.to, nowS) : bar.to;
}

/**
 * @typedef {{ lane: Lane, top: number, height: number, rowHeight: number }} Place
 * @typedef {{ places: Place[], headings: { text: string, top: number }[], height: number }} Stack
 */

/** The lanes below each other, those of a node under its name where there are several. @param {Lane[]} lanes @returns {Stack} */
export function stacked(lanes) {
  const rows = lanes.reduce((sum, lane) => sum + lane.rows, 0);
  const rowHeight = rows <= 8 ? 30 : rows <= 16 ? 24 : rows <= 32 ? 18 : 13;
  const several = new Set(lanes.map((lane) => lane.node)).size > 1;
  const places = /** @type {Place[]} */ ([]);
  const headings = /** @type {{ text: string, top: number }[]} */ ([]);
  let top = 0;
  let node = "";
  for (const lane of lanes) {
    if (several && lane.node !== node) {
      headings.push({ text: plain(lane.node), top });
      top += HEADING_PX;
      node = lane.node;
    }
    const inner = lane.user ? Math.max(4, Math.min(rowHeight, Math.floor(USER_PX / lane.rows))) : rowHeight;
    const height = Math.max(lane.user ? LEAST_USER_PX : 0, lane.rows * inner) + 1;
    places.push({ lane, top, height, rowHeight: inner });
    top += height;
  }
  return { places, headings, height: top };
}

/** The bar at a point, and its place; null where there is none. @param {Stack} stack */
export function barAt(stack, window, width, x, y, nowS) {
  const place = stack.places.find(({ top, height }) => y >= top && y < top + height);
  if (!place) return null;
  const perPixel = (window[1] - window[0]) / width;
  const at = window[0] + x * perPixel;
  const row = place.lane.bars[Math.floor((y - place.top) / place.rowHeight)] ?? [];
  const bar = row.findLast((one) => one.from - perPixel <= at && endOf(one, nowS) + perPixel >= at);
  return bar ? { place, bar } : null;
}

/** The bar that a key leads to from another: the one before or after it, or the nearest of another lane. @param {Stack} stack */
export function neighbour(stack, chosen, key, window) {
  const middle = ({ from, to }) => (Math.max(from, window[0]) + Math.min(to, window[1])) / 2;
  const barsOf = (place) => [...new Set(place.lane.bars.flat())].sort((one, other) => one.from - other.from);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const bars = barsOf(chosen.place);
    const bar = bars[bars.indexOf(chosen.bar) + (key === "ArrowLeft" ? -1 : 1)];
    return bar ? { place: chosen.place, bar } : null;
  }
  const step = key === "ArrowUp" ? -1 : 1;
  const at = middle(chosen.bar);
  for (let index = stack.places.indexOf(chosen.place) + step; stack.places[index]; index += step) {
    const near = barsOf(stack.places[index]).filter(
      (bar) => bar.from <= window[1] && (bar.open || bar.to >= window[0]),
    );
    if (!near.length) continue;
    const bar = near.reduce((best, one) => (Math.abs(middle(one) - at) < Math.abs(middle(best) - at) ? one : best));
    return { place: stack.places[index], bar };
  }
  return null;
}
