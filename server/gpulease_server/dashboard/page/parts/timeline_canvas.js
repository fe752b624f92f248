// Draws a timeline on a canvas: thousands of bars in a few milliseconds, so that moving and zooming stay fluid.

import { hueOf } from "../model.js";
import { colourOf } from "./colours.js";
import { drawnBars, endOf, ticks } from "./timeline_layout.js";

const TEXT_PX = 6.4; // about the width of a letter
const LEAST_TEXT_PX = 34;
const INSET = 2;
/** How each kind of band is drawn: its colour, and the lines of its pattern in a square of 8. */
export const BANDS = {
  unhealthy: { colour: "--red", lines: ["M0 8L8 0", "M0 0L8 8"] },
  cordoned: { colour: "--grey", lines: ["M0 4H8"] },
  foreign: { colour: "--orange", lines: ["M4 1L7 4L4 7L1 4Z"] },
  unknown: { colour: "--grey", lines: ["M1 1H4", "M5 5H8"] },
  draining: { colour: "--amber", lines: ["M0 0L8 8"] },
};
/** Where nothing is kept of, and where a lease did nothing. */
export const MARKS = {
  idle: { colour: "--sheet", lines: ["M-2 2L2 -2", "M0 8L8 0", "M6 10L10 6"] },
  "not kept": { colour: "--line", lines: ["M-2 2L2 -2", "M0 8L8 0", "M6 10L10 6"] },
};

/** The colours and patterns of a drawing, in the scheme of the page. */
export function paletteOf(place, context) {
  const names = ["--text", "--quiet", "--grid", "--line", "--sheet", "--track", "--link", "--red"];
  const colours = Object.fromEntries(names.map((name) => [name, colourOf(place, name)]));
  const hues = Array.from({ length: 8 }, (_, at) => colourOf(place, `--hue-${at}`));
  const patterns = Object.fromEntries(
    Object.entries({ ...BANDS, ...MARKS }).map(([name, { colour, lines }]) => {
      return [name, { colour: colourOf(place, colour), pattern: patternOf(context, colourOf(place, colour), lines) }];
    }),
  );
  return { colours, hues, patterns };
}

function patternOf(context, colour, lines) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = /** @type {any} */ (tile.getContext("2d"));
  pen.strokeStyle = colour;
  pen.lineWidth = 1.3;
  for (const line of lines) pen.stroke(new Path2D(line));
  return context.createPattern(tile, "repeat");
}

/**
 * Draw everything. `picture` has `stack`, `window`, `width`, `height` of the canvas, `nowS`, `idle` (spans by UUID),
 * `completeS` (before it not everything is known, or null), `queue` (steps) and `queueTop`.
 */
export function drawTimeline(canvas, palette, picture) {
  const { width, height, window, nowS } = picture;
  const scale = devicePixelRatio;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const x = (at) => ((at - window[0]) / (window[1] - window[0])) * width;
  const tools = { pen, palette, picture, x };
  if (picture.completeS !== null && picture.completeS > window[0])
    hatch(tools, "not kept", 0, 0, Math.min(width, x(picture.completeS)), height);
  drawGrid(tools);
  drawQueue(tools);
  for (const place of picture.stack.places) drawLane(tools, place);
  if (nowS < window[1]) {
    pen.fillStyle = palette.colours["--link"];
    pen.fillRect(Math.round(x(nowS)) - 1, 0, 2, height);
  }
}

function drawGrid({ pen, palette, picture, x }) {
  for (const { at, day } of ticks(picture.window, picture.width)) {
    pen.fillStyle = palette.colours[day ? "--line" : "--grid"];
    pen.fillRect(Math.round(x(at)), 0, 1, picture.height);
  }
  pen.fillStyle = palette.colours["--grid"];
  for (const { top, height } of picture.stack.places) pen.fillRect(0, top + height - 1, picture.width, 1);
}

/** The length of the queue as steps, with its greatest length in the window. */
function drawQueue({ pen, palette, picture, x }) {
  const { queue, queueTop, queueHeight, window, nowS } = picture;
  if (!queue.length) return;
  const seen = queue.filter((_, at) => (queue[at + 1]?.at ?? nowS) >= window[0] && queue[at].at <= window[1]);
  const most = Math.max(0, ...seen.map(({ length }) => length));
  const base = queueTop + queueHeight - 3;
  pen.fillStyle = palette.colours["--quiet"];
  seen.forEach(({ at, length }, index) => {
    const left = Math.max(0, x(at));
    const right = Math.min(x(nowS), seen[index + 1] ? x(seen[index + 1].at) : picture.width);
    const high = most ? Math.max(length ? 1 : 0, (length / most) * (queueHeight - 16)) : 0;
    pen.fillRect(left, base - high, Math.max(0, right - left), high);
  });
  pen.fillText(most ? `at most ${most}` : "empty", 4, queueTop + 7);
}

/** @param {any} tools @param {import("./timeline_layout.js").Place} place */
function drawLane(tools, { lane, top, height, rowHeight }) {
  const { picture, x } = tools;
  for (const band of drawnBars(lane.bands, picture.window, picture.width)) {
    const left = Math.max(0, x(band.from));
    hatch(tools, band.kind, left, top, Math.min(picture.width, x(endOf(band, picture.nowS))) - left, height - 1, 0.22);
    label(
      tools,
      `${band.kind}${band.reason ? `: ${band.reason}` : ""}`,
      left,
      x(endOf(band, picture.nowS)),
      top + height / 2,
      "--text",
    );
  }
  const idle = picture.idle.get(lane.uuid) ?? [];
  lane.bars.forEach((bars, row) => {
    const inset = lane.user ? 0.25 : INSET; // the GPUs of a lease form a block
    const [barTop, barHeight] = [top + row * rowHeight + inset, rowHeight - 2 * inset];
    let first = 0; // of the spans without work that may lie on a bar: both are in the order of time
    for (const bar of drawnBars(bars, picture.window, picture.width)) {
      while (first < idle.length && idle[first].to < bar.from) first += 1;
      drawBar(tools, bar, barTop, barHeight, idle, first);
    }
  });
}

function drawBar(tools, bar, top, height, idle, first) {
  const { pen, palette, picture, x } = tools;
  const [left, right] = [Math.max(-2, x(bar.from)), Math.min(picture.width + 2, x(endOf(bar, picture.nowS)))];
  const hue = palette.hues[hueOf(bar.span.user ?? "?")];
  pen.fillStyle = hue;
  pen.fillRect(left, top, Math.max(1, right - left - (right - left > 3 ? 0.5 : 0)), height);
  for (let at = first; at < idle.length && idle[at].from <= bar.to; at += 1) {
    const [begin, end] = [Math.max(left, x(idle[at].from)), Math.min(right, x(idle[at].to))];
    if (end - begin >= 1) hatch(tools, "idle", begin, top, end - begin, height);
  }
  if (height > 9) label(tools, bar.text, Math.max(0, left), right, top + height / 2, "--sheet", hue);
}

function hatch({ pen, palette }, kind, left, top, width, height, tint = 0) {
  if (width <= 0 || !palette.patterns[kind]) return;
  const { colour, pattern } = palette.patterns[kind];
  if (tint) {
    pen.globalAlpha = tint;
    pen.fillStyle = colour;
    pen.fillRect(left, top, Math.max(1, width), height);
    pen.globalAlpha = 1;
  }
  pen.fillStyle = pattern;
  pen.fillRect(left, top, Math.max(1, width), height);
}

/** As much of a text as fits; `back` is drawn behind it, where it stands on a pattern. */
function label({ pen, palette }, text, left, right, middle, colour, back = palette.colours["--sheet"]) {
  const room = right - left - 8;
  if (room < LEAST_TEXT_PX) return;
  const most = Math.floor(room / TEXT_PX);
  const shown = text.length <= most ? text : `${text.slice(0, most - 1)}…`;
  pen.fillStyle = back;
  pen.fillRect(left + 3, middle - 6, Math.min(room, pen.measureText(shown).width + 3), 12);
  pen.fillStyle = palette.colours[colour];
  pen.fillText(shown, left + 5, middle);
}
