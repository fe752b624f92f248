// Four plots of the same GPUs over the same time: one cursor goes through all, and a zoom of one is a zoom of all.

import { moment } from "../clock.js";
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { isDark } from "../theme.js";
import { colourOf } from "./colours.js";

const GIB = 1024 ** 3;
const HEIGHT = 190;
const AGAIN_MS = 3000; // to ask for the library again, when it did not arrive
const LEAST_ZOOM_S = 8;
const COLOURS = 8; // of --line-0 to --line-7; later lines have them again, dashed
const DASHES = [[], [6, 3], [2, 3]];
const MEASURES = [
  { key: "utilization_ratio", title: "GPU utilization", unit: "%", scale: 100, digits: 0, least: [0, 100] },
  { key: "memory_used_bytes", title: "Memory", unit: "GiB", scale: 1 / GIB, digits: 1, least: [0, 1] },
  { key: "power_w", title: "Power", unit: "W", scale: 1, digits: 0, least: [0, 100] },
  { key: "temperature_c", title: "Temperature", unit: "°C", scale: 1, digits: 0, least: null },
];

/**
 * @typedef {{ mean: (number | null)[], max: (number | null)[] }} Curve
 * @typedef {{ label: string, times: number[], utilization_ratio: Curve, memory_used_bytes: Curve, power_w: Curve, temperature_c: Curve }} Line
 * One GPU: times in seconds since 1970, and the four measures at them.
 */

/** The four plots. `zoom`: null, or the first and last second that are shown; `onZoom` is told of another. */
export function Plots({ lines, statistic = "mean", zoom, onZoom, group }) {
  const [off, setOff] = useState(/** @type {string[]} */ ([]));
  const shown = lines.filter((line) => !off.includes(line.label));
  // The page is drawn every second; plots only when there is something else to see.
  const plots = useMemo(
    () =>
      html`<div class="plots">${MEASURES.map((measure) => html`<${Plot} key=${measure.key} measure=${measure} all=${lines} lines=${shown} statistic=${statistic} zoom=${zoom} onZoom=${onZoom} group=${group} />`)}</div>`,
    [lines, off, statistic, zoom?.[0], zoom?.[1], group, isDark()],
  );
  const toggle = (label) => setOff(off.includes(label) ? off.filter((one) => one !== label) : [...off, label]);
  return html`<div class="plots-all">
    <div class="legend">
      <${ZoomButtons} lines=${lines} zoom=${zoom} onZoom=${onZoom} />
      ${
        lines.length > 1 &&
        html`<div class="legend-lines" role="group" aria-label="Lines">${lines.map((line, at) => html`<button type="button" key=${line.label} aria-pressed=${!off.includes(line.label)} onClick=${() => toggle(line.label)}><${Dash} at=${at} />${line.label}</button>`)}
</div>`
      }
    </div>
    ${plots}
  </div>`;
}

/** For those who have no pointer to drag with. */
function ZoomButtons({ lines, zoom, onZoom }) {
  const known = lines.flatMap((line) => [line.times[0], line.times.at(-1)]).filter((at) => at !== undefined);
  const all = [Math.min(...known), Math.max(...known)];
  const [from, to] = zoom ?? all;
  const change = (factor) => {
    const [middle, half] = [(from + to) / 2, (factor * (to - from)) / 2];
    const next = [Math.round(Math.max(all[0], middle - half)), Math.round(Math.min(all[1], middle + half))];
    onZoom(next[1] - next[0] >= all[1] - all[0] - 1 ? null : next);
  };
  if (!known.length) return null;
  return html`<div class="choice" role="group" aria-label="Zoom"><button type="button" aria-label="Zoom in" disabled=${to - from < LEAST_ZOOM_S} onClick=${() => change(0.5)}>+</button>
    <button type="button" aria-label="Zoom out" disabled=${!zoom} onClick=${() => change(2)}>−</button>
    ${zoom && html`<button type="button" onClick=${() => onZoom(null)}>Reset zoom</button>`}</div>`;
}

function Dash({ at }) {
  return html`<svg class=${`dash line-${at % COLOURS}`} viewBox="0 0 16 4" aria-hidden="true"><path d="M0 2h16" stroke-dasharray=${DASHES[Math.floor(at / COLOURS) % DASHES.length].join(" ")} /></svg>`;
}

/** Times of all lines, and each line's values at them. `undefined`: this line has no such time; null: its value is unknown. */
export function aligned(lines, key, statistic, scale) {
  const times = [...new Set(lines.flatMap((line) => line.times))].sort((one, other) => one - other);
  const place = new Map(times.map((time, at) => [time, at]));
  const columns = lines.map((line) => {
    const column = Array(times.length).fill(undefined);
    line.times.forEach((time, at) => {
      const value = line[key][statistic][at];
      column[place.get(time) ?? 0] = value === null || value === undefined ? null : value * scale;
    });
    return column;
  });
  return [times, ...columns];
}

function Plot({ measure, all, lines, statistic, zoom, onZoom, group }) {
  const place = useRef(/** @type {any} */ (null));
  const plot = useRef(/** @type {any | null} */ (null));
  const latest = useRef({ zoom, onZoom });
  latest.current = { zoom, onZoom };
  const [cursor, setCursor] = useState(/** @type {any} */ (null));
  const data = useMemo(() => aligned(lines, measure.key, statistic, measure.scale), [lines, statistic]);
  const dark = isDark();
  const labels = lines.map((line) => line.label).join("\n");
  const current = useRef(data);
  current.current = data;
  useEffect(() => {
    let gone = false;
    let sized = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const draw = ({ uPlot }) => {
      if (gone) return;
      const numbers = lines.map((line) => all.indexOf(line));
      plot.current = new uPlot(
        options(place.current, measure, lines, numbers, latest, group, setCursor),
        current.current,
        place.current,
      );
      place.current.plot = plot.current;
      sized = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height: HEIGHT }));
      sized.observe(place.current);
    };
    const later = () => {
      if (!gone) timer = setTimeout(load, AGAIN_MS);
    };
    const load = () => import("../vendor/uplot.js").then(draw, later);
    load();
    return () => {
      gone = true;
      clearTimeout(timer);
      sized?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [labels, dark, group]);
  useEffect(() => plot.current?.setData(data), [data]);
  useEffect(() => {
    const [from, to] = span(zoom, current.current);
    plot.current?.setScale("x", { min: from, max: to });
  }, [zoom?.[0], zoom?.[1]]);
  const times = data[0];
  const at = cursor !== null && cursor < times.length ? cursor : null;
  return html`<figure class="plot" data-measure=${measure.key}>
    <figcaption><h3>${measure.title}</h3><span class="at">${at === null ? "" : moment(1000 * times[at])}</span>
      <span class="values">${lines.map((line, number) => html`<span key=${line.label} title=${line.label}><${Dash} at=${all.indexOf(line)} />${valueAt(data[number + 1], at, measure)}</span>`)}</span></figcaption>
    <div class="canvas" ref=${place} role="img" aria-label=${`${measure.title} of ${lines.map((line) => line.label).join(", ")}`}></div>
  </figure>`;
}

/** The value under the cursor, else the last one. */
function valueAt(column, at, measure) {
  const index = at ?? column.findLastIndex((value) => value !== undefined);
  const value = column[index];
  return value === null || value === undefined ? "?" : `${value.toFixed(measure.digits)} ${measure.unit}`;
}

function span(zoom, data) {
  if (zoom) return zoom;
  const times = data[0];
  return times.length > 1 ? [times[0], times.at(-1)] : [(times[0] ?? 0) - 30, (times[0] ?? 0) + 30];
}

/** @returns {any} Options of uPlot. */
function options(place, measure, lines, numbers, latest, group, setCursor) {
  const colour = (name) => colourOf(place, name);
  const axis = {
    stroke: colour("--quiet"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
  };
  return {
    width: place.clientWidth || 400,
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    cursor: {
      sync: { key: group },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: { dblclick: () => () => latest.current.onZoom(null) },
    },
    scales: {
      x: { time: true, range: (plot) => span(latest.current.zoom, plot.data) },
      y: { range: (_plot, least, most) => heights(least, most, measure) },
    },
    axes: [
      { ...axis, size: 30, values: (_plot, splits, _axis, _space, step) => splits.map((at) => clockTime(at, step)) },
      { ...axis, size: 58, values: (_plot, splits) => splits.map((value) => `${value} ${measure.unit}`) },
    ],
    series: [
      {},
      ...lines.map((line, at) => ({
        label: line.label,
        stroke: colour(`--line-${numbers[at] % COLOURS}`),
        dash: DASHES[Math.floor(numbers[at] / COLOURS) % DASHES.length],
        width: 1.5,
        points: { show: false },
        spanGaps: false,
      })),
    ],
    hooks: {
      setCursor: [(plot) => setCursor(plot.cursor.idx ?? null)],
      setSelect: [
        (plot) => {
          if (plot.select.width < 4) return;
          const from = plot.posToVal(plot.select.left, "x");
          const to = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          latest.current.onZoom([Math.round(from), Math.round(to)]);
        },
      ],
    },
  };
}

/** The lowest and highest value that a plot shows: zero is always there where it means something. */
function heights(least, most, { least: wanted }) {
  if (least === null || most === null) return wanted ?? [0, 100];
  if (wanted === null) return [Math.floor((least - 3) / 10) * 10, Math.ceil((most + 3) / 10) * 10];
  return [wanted[0], Math.max(wanted[1], most * (wanted[1] === 100 && most <= 100 ? 1 : 1.08))];
}

function clockTime(atS, step) {
  const at = new Date(1000 * atS);
  if (step >= 86_400) return at.toLocaleDateString("sv-SE").slice(5);
  return at.toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}
