// Usage: GPU-hours held, used, idle and unknown, by user or otherwise, in a period.

import { moment, nowMs } from "../clock.js";
import { percent, plain } from "../format.js";
import { html } from "../html.js";
import { matches } from "../model.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { SaveCsv } from "../parts/csv.js";
import { zoomOf } from "../parts/history_plots.js";
import { LimitsSection } from "../parts/limits.js";
import { Link, More, User } from "../parts/marks.js";
import { setQuery } from "../route.js";

const DAY_MS = 86_400_000;
const RANGES = { day: "1d", week: "7d", month: "30d" };
const GRAIN_MS = 600_000; // the address changes rarely, so that the daemon's answers are used again
const EVERY_MS = 60_000;
const ROWS = 5;
const MOST_ROWS = 200;
const GROUPS = ["user", "day", "label", "node"];
const MEASURES = [
  { key: "gpu_hours_held", name: "Held" },
  { key: "gpu_hours_used", name: "Used" },
  { key: "gpu_hours_idle", name: "Idle" },
  { key: "gpu_hours_unknown", name: "Unknown" },
];

/** The whole view. */
export function UsageView({ data, q, query }) {
  const by = GROUPS.includes(query.group) ? query.group : "user";
  const range = Object.hasOwn(RANGES, query.range) ? query.range : "week";
  const zoom = zoomOf(query);
  const answer = useAnswer(`v1/usage?by=${by}&${periodOf(zoom, range)}`, EVERY_MS);
  const { value } = answer;
  const sort = MEASURES.find(({ name }) => name.toLowerCase() === query.sort)?.key;
  const shares = sorted(
    (value?.shares ?? []).filter((share) => matches(q, [share.key])),
    sort,
  );
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Usage</h1>
      <div class="choice" role="group" aria-label="Time">${Object.keys(RANGES).map((name) => html`<button type="button" key=${name} aria-pressed=${!zoom && name === range} onClick=${() => setQuery({ range: name, from: "", to: "" })}>${name}</button>`)}</div>
      <div class="choice" role="group" aria-label="Group">${GROUPS.map((name) => html`<button type="button" key=${name} aria-pressed=${name === by} onClick=${() => setQuery({ group: name, sort: "" })}>by ${name}</button>`)}</div>
      ${value && html`<${SaveCsv} name=${`usage-by-${by}`} rows=${() => csvRows(value)} />`}
      <span class="facts">GPU-hours${value ? ` from ${moment(Date.parse(value.from_at))} to ${moment(Date.parse(value.to_at))}` : ""}${by === "day" ? ", days in UTC" : ""}</span></div>
    <${Trouble} answer=${answer} />
    ${!answer.problem && !value && html`<p class="none">Loading...</p>`}
    ${value && shares.length === 0 && html`<p class="none">${q ? "Nothing matches." : "No lease held a GPU in this time."}</p>`}
    ${shares.length > 0 && html`<${Table} ...${{ shares, by, sort, query }} total=${q ? null : value} /><${Key} />`}
    <p class="all"><${Link} view="timeline" query=${{ from: query.from, to: query.to, range: { day: "24h", week: "7d", month: "30d" }[range], by: "user", q }}>The leases of this time<//>
      ${!zoom && html` <span class="quiet">In a terminal: <code>gpulease usage --since ${RANGES[range]}${by === "user" ? "" : ` --by ${by}`}</code></span>`}</p>
  </section>
  <${LimitsSection} me=${data.me} q=${q} />`;
}

function Table({ shares, by, sort, query, total }) {
  const most = Math.max(...shares.map((share) => share.gpu_hours_held), 0.01);
  const rows =
    total && shares.length > 1
      ? [...shares.slice(0, MOST_ROWS), { ...total, key: null, all: true }]
      : shares.slice(0, MOST_ROWS);
  const head = ({ key, name }) => {
    const chosen = key === (sort ?? (by === "day" ? "" : "gpu_hours_held"));
    const choose = () => setQuery({ sort: query.sort === name.toLowerCase() ? "" : name.toLowerCase() });
    return html`<th scope="col" class="number" key=${key} aria-sort=${chosen ? "descending" : null}><button type="button" class="sort" onClick=${choose}>${name}${chosen ? " ▾" : ""}</button></th>`;
  };
  return html`<table id="usage"><thead><tr><th scope="col">${by[0].toUpperCase() + by.slice(1)}</th><th scope="col"><span class="unseen">Share</span></th>${MEASURES.map(head)}<th scope="col" class="number">Utilization</th><th scope="col" class="number">Leases</th></tr></thead>
    <tbody>${rows.map(
      (share) => html`<tr key=${share.all ? "" : `key ${share.key}`} class=${share.all ? "total" : ""}>
      <td data-label=${by}>${share.all ? html`<strong>all</strong>` : html`<${Name} by=${by} name=${share.key} />`}</td>
      <td class="wide">${!share.all && html`<${UsageBar} share=${share} most=${most} />`}</td>
      ${MEASURES.map(({ key, name }) => html`<td key=${key} data-label=${name} class="number">${hours(share[key])}</td>`)}
      <td data-label="Utilization" class="number">${percent(utilization(share))}</td>
      <td data-label="Leases" class="number">${share.leases}</td>
    </tr>`,
    )}</tbody></table><${More} hidden=${shares.length - MOST_ROWS} />`;
}

function Name({ by, name }) {
  if (name === null) return html`<span class="quiet">none</span>`;
  return by === "user" ? html`<${User} name=${name} />` : plain(name);
}

/** Held as a track from 0, of it used, and at its end idle and unknown. */
function UsageBar({ share, most }) {
  const [held, used, idle, unknown] = MEASURES.map(({ key }) => (100 * (share[key] ?? 0)) / most);
  const part = (kind, left, width) =>
    width > 0 && html`<i class=${kind} style=${{ left: `${left}%`, width: `${width}%` }}></i>`;
  return html`<span class="usage-bar" aria-hidden="true">
    ${part("held", 0, held)}${part("idle", held - unknown - idle, idle)}${part("unknown", held - unknown, unknown)}${part("used", 0, used)}
  </span>`;
}

function Key() {
  const parts = [
    ["used", "used: utilization times time"],
    ["held", "held"],
    ["idle", "idle: no work at all"],
    ["unknown", "unknown"],
  ];
  return html`<p class="timeline-legend">${parts.map(([kind, text]) => html`<span key=${kind}><i class=${`band ${kind}`} aria-hidden="true"></i>${text}</span>`)}</p>`;
}

/** The last 24 hours by user, for a side of a view. */
export function UsageToday() {
  const { value } = useAnswer(`v1/usage?by=user&${periodOf(null, "day")}`, EVERY_MS);
  if (!value?.shares?.length) return null;
  const most = Math.max(...value.shares.map((share) => share.gpu_hours_held), 0.01);
  return html`<section class="sheet" aria-labelledby="usage-today">
    <div class="head"><h2 id="usage-today">GPU-hours, last 24 h</h2><span class="facts">held / used</span><${Link} view="usage">All<//></div>
    <table class="slim usage"><thead class="unseen"><tr><th scope="col">User</th><th scope="col">Share</th><th scope="col">Hours</th></tr></thead>
    <tbody>${value.shares.slice(0, ROWS).map(
      (share) => html`<tr key=${share.key}>
      <td class="cut"><${User} name=${share.key ?? "?"} /></td>
      <td class="wide"><${UsageBar} share=${{ ...share, gpu_hours_idle: null, gpu_hours_unknown: null }} most=${most} /></td>
      <td class="nowrap number">${gpuHours(share.gpu_hours_held)} / ${gpuHours(share.gpu_hours_used)}</td>
    </tr>`,
    )}</tbody></table>
  </section>`;
}

/** The period as the daemon is asked for it: that of the address, else until now. */
function periodOf(zoom, range) {
  const iso = (atMs) => new Date(atMs).toISOString().replace(".000", "");
  if (zoom) return `from=${iso(1000 * zoom[0])}&to=${iso(1000 * zoom[1])}`;
  const beginMs = nowMs() - Number.parseInt(RANGES[range], 10) * DAY_MS;
  return `from=${iso(Math.floor(beginMs / GRAIN_MS) * GRAIN_MS)}`;
}

function sorted(shares, key) {
  return key ? shares.toSorted((one, other) => (other[key] ?? -1) - (one[key] ?? -1)) : shares;
}

/** Of the time for which it is known; null where it is known for none. */
function utilization(share) {
  const known = share.gpu_hours_held - share.gpu_hours_unknown;
  return share.gpu_hours_used === null || known <= 0 ? null : share.gpu_hours_used / known;
}

/** GPU-hours as `gpulease usage` prints them. */
function hours(value) {
  if (value === null || value === undefined) return "-";
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** GPU-hours in a few digits; ? if unknown. */
export function gpuHours(value) {
  if (value === null || value === undefined) return "?";
  if (value >= 10) return String(Math.round(value));
  return value.toFixed(value < 1 ? 2 : 1);
}

function csvRows({ by, shares }) {
  const keys = MEASURES.map(({ key }) => key);
  return [
    [by, ...keys, "leases"],
    ...shares.map((share) => [share.key, ...keys.map((key) => share[key]), share.leases]),
  ];
}
