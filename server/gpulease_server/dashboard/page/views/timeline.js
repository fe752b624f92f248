// Timeline: who had which GPU when, what kept a GPU from being used, and how long the queue was.

import { moment, nowMs } from "../clock.js";
import { duration, plain } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { gpuNames } from "../model.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { SaveCsv } from "../parts/csv.js";
import { zoomOf, zoomTo } from "../parts/history_plots.js";
import { Link, Moment, More, User } from "../parts/marks.js";
import { targetOf, TimelineChart } from "../parts/timeline_chart.js";
import {
  askedPeriod,
  endOf,
  gpuLanes,
  idleSpans,
  leasesIn,
  moved,
  partOf,
  stacked,
  userLanes,
  windowOf,
  zoomed,
} from "../parts/timeline_layout.js";
import { setQuery } from "../route.js";

const RANGES = { "1h": 3600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000 };
const MOST_LEASES = 10_000;
const MOST_LANES = 256;
const MOST_ROWS = 200;
const POINTS = 480;
const PIXELS = 700; // about how wide it is: the picture is asked for again when it is a pixel old
const FASTEST_MS = 5000;
const SLOWEST_MS = 60_000;
const SETTLES_MS = 300;
const LEGEND = ["idle", "unhealthy", "cordoned", "foreign", "unknown", "draining"];

/** The whole view. */
export function Timeline({ data, q, query }) {
  const nowS = nowMs() / 1000;
  const range = Object.hasOwn(RANGES, query.range) ? query.range : "24h";
  const zoom = zoomOf(query);
  const [moving, setMoving] = useState(/** @type {[number, number] | null} */ (null));
  const window = moving ?? windowOf(zoom, RANGES[range], nowS);
  const { timeline, history, answer } = useTimeline(window, nowS);
  const byUser = query.by === "user";
  const lanes = useMemo(
    () => (timeline ? (byUser ? userLanes : gpuLanes)(data, timeline, q, nowMs() / 1000) : []),
    [timeline, byUser, q, data.working, data.over, data.waiting],
  );
  const stack = useMemo(() => stacked(lanes.slice(0, MOST_LANES)), [lanes]);
  const idle = useMemo(() => idleSpans(history), [history]);
  useSettled(moving, setMoving, query);
  const gpuName = gpuNames(data);
  const asTable = query.as === "table";
  const facts = `${moment(1000 * window[0])} to ${zoom ? moment(1000 * Math.min(nowS, window[1])) : "now"}`;
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Timeline</h1>
      <div class="choice" role="group" aria-label="Time">${Object.keys(RANGES).map((name) => html`<button type="button" key=${name} aria-pressed=${!zoom && name === range} onClick=${() => setQuery({ range: name, from: "", to: "" })}>${name}</button>`)}</div>
      <${Move} window=${window} onMove=${setMoving} live=${!zoom && !moving} />
      <div class="choice" role="group" aria-label="Lines">${["GPU", "user"].map((name) => html`<button type="button" key=${name} aria-pressed=${(name === "user") === byUser} onClick=${() => setQuery({ by: name === "user" ? "user" : "" })}>by ${name}</button>`)}</div>
      <button type="button" aria-pressed=${asTable} onClick=${() => setQuery({ as: asTable ? "" : "table" })}>As table</button>
      <${SaveCsv} name="timeline" rows=${() => csvRows(lanes, window, gpuName)} />
      <span class="facts">${facts}</span></div>
    <${Trouble} answer=${answer} />
    ${!answer.problem && !timeline && html`<p class="none">Loading...</p>`}
    ${timeline && html`<${Gaps} timeline=${timeline} window=${window} />`}
    ${timeline && lanes.length === 0 && html`<p class="none">${q ? "No lease matches." : byUser ? "No one held a GPU in this time." : "No GPUs are known."}</p>`}
    ${lanes.length > 0 && !asTable && html`<${TimelineChart} ...${{ stack, window, timeline, history, idle, gpuName }} onMove=${setMoving} /><${Legend} />`}
    ${lanes.length > 0 && asTable && html`<${Table} bars=${leasesIn(lanes, window)} gpuName=${gpuName} nowS=${nowS} />`}
    ${!asTable && html`<${More} hidden=${lanes.length - MOST_LANES} />`}
  </section>`;
}

/** What the daemon knows of a window and some time around it. What was known before is drawn until the rest has arrived. */
function useTimeline(window, nowS) {
  const [from, to] = askedPeriod(window);
  const period = `from=${iso(from)}${to < nowS ? `&to=${iso(to)}` : ""}`;
  const everyMs = Math.min(SLOWEST_MS, Math.max(FASTEST_MS, (1000 * (window[1] - window[0])) / PIXELS));
  const live = to >= nowS;
  const timeline = useAnswer(`v1/timeline?${period}&limit=${MOST_LEASES}`, live ? everyMs : null);
  const history = useAnswer(`v1/gpus/history?${period}&points=${POINTS}`, live ? Math.max(20_000, everyMs) : null);
  const before = useRef(/** @type {any} */ ({ timeline: null, history: null }));
  if (timeline.value) before.current.timeline = timeline.value;
  if (history.value) before.current.history = history.value;
  return { ...before.current, answer: timeline };
}

function iso(atS) {
  return new Date(1000 * atS).toISOString().replace(".000", "");
}

/** A window that was moved is put into the address as soon as it rests. */
function useSettled(moving, setMoving, query) {
  const put = useRef(/** @type {[number, number] | null} */ (null));
  useEffect(() => {
    if (!moving) return undefined;
    const settle = () => {
      put.current = moving;
      zoomTo(moving);
    };
    const timer = setTimeout(settle, SETTLES_MS);
    return () => clearTimeout(timer);
  }, [moving]);
  useEffect(() => {
    const settled = put.current; // null where the address was changed by other means
    put.current = null;
    setMoving((now) => (settled && now !== settled ? now : null)); // it may have moved on before this frame
  }, [query.from, query.to, query.range]);
}

function Move({ window, onMove, live }) {
  const nowS = nowMs() / 1000;
  const length = window[1] - window[0];
  const middle = (window[0] + window[1]) / 2;
  const button = (name, text, does) =>
    html`<button type="button" aria-label=${name} title=${name} onClick=${does}>${text}</button>`;
  return html`<div class="choice" role="group" aria-label="Move">
    ${button("Earlier", "←", () => onMove(moved(window, -length / 2, nowS)))}
    ${button("Later", "→", () => onMove(moved(window, length / 2, nowS)))}
    ${button("Zoom in", "+", () => onMove(zoomed(window, 0.5, middle, nowS)))}
    ${button("Zoom out", "−", () => onMove(zoomed(window, 2, middle, nowS)))}
    ${!live && html`<button type="button" onClick=${() => zoomTo(null)}>Now</button>`}
  </div>`;
}

/** What the daemon cannot tell of this window. */
function Gaps({ timeline, window }) {
  const since = timeline.complete_since ? Date.parse(timeline.complete_since) / 1000 : 0;
  if (since > window[0])
    return html`<p class="problem">Before <${Moment} at=${timeline.complete_since} /> not everything is known.</p>`;
  if (timeline.next)
    return html`<p class="problem">Only the last ${MOST_LEASES} leases are drawn. Zoom in for the others.</p>`;
  return null;
}

function Legend() {
  return html`<p class="timeline-legend" aria-label="Patterns">
    <span>A bar is a lease, in the colour of its user.</span>
    ${LEGEND.map((kind) => html`<span key=${kind}><i class=${`band band-${kind}`} aria-hidden="true"></i>${kind}</span>`)}
    <span class="keys">Drag or Shift and wheel: move. Ctrl and wheel: zoom. Arrow keys: from lease to lease.</span>
  </p>`;
}

function Table({ bars, gpuName, nowS }) {
  return html`<table id="timeline-table"><thead><tr><th scope="col">User</th><th scope="col">What</th><th scope="col">GPUs</th><th scope="col">From</th><th scope="col">To</th><th scope="col">Held for</th><th scope="col">End</th></tr></thead>
    <tbody>${bars.slice(0, MOST_ROWS).map(
      (bar) => html`<tr key=${partOf(bar)}>
      <td data-label="User"><${User} name=${bar.span.user ?? "?"} /></td>
      <td data-label="What"><${Link} ...${targetOf(bar)}>${nameOf(bar) || bar.span.lease_id}<//></td>
      <td data-label="GPUs">${plain(bar.span.gpus.map(gpuName).join(", "), 120)}</td>
      <td data-label="From" class="nowrap"><${Moment} at=${bar.span.from_at} /></td>
      <td data-label="To" class="nowrap">${bar.open ? "now" : html`<${Moment} at=${bar.span.to_at} />`}</td>
      <td data-label="Held for" class="nowrap">${duration(endOf(bar, nowS) - bar.from)}</td>
      <td data-label="End">${plain((bar.span.end_reason ?? "").replaceAll("_", " "))}</td>
    </tr>`,
    )}</tbody></table>
    <${More} hidden=${bars.length - MOST_ROWS} />`;
}

function nameOf(bar) {
  return bar.text.slice((bar.span.user ?? "").length).trim();
}

function csvRows(lanes, window, gpuName) {
  const head = ["user", "name", "gpus", "from", "to", "lease", "job", "end_reason"];
  const rows = leasesIn(lanes, window).map((bar) => {
    const { user, gpus, from_at: from, to_at: to, lease_id: lease, job_id: job, end_reason: end } = bar.span;
    return [user, nameOf(bar), gpus.map(gpuName).join(" "), from, to, lease, job, end];
  });
  return [head, ...rows];
}
