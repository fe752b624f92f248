// The picture of a timeline, and how a reader moves in it: with the pointer, the wheel, touch, and by keyboard.

import { moment, nowMs } from "../clock.js";
import { duration, percent, plain } from "../format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { address } from "../route.js";
import { isDark } from "../theme.js";
import { Link, User } from "./marks.js";
import { drawTimeline, paletteOf } from "./timeline_canvas.js";
import { barAt, endOf, moved, neighbour, partOf, ticks, usedShare, zoomed } from "./timeline_layout.js";

const QUEUE_PX = 40;
const DRAG_PX = 4;
const ZOOM = 1.6;
const TIP_PX = 280;
const LABEL_PX = 16;
const LETTER_PX = 8;

/** Where a bar leads: to the job, else the lease. */
export function targetOf({ span }) {
  return span.job_id ? { view: "jobs", id: span.job_id } : { view: "leases", id: span.lease_id ?? "" };
}

/** The chart. `window`: its first and last second; `onMove` is told of another. */
export function TimelineChart({ stack, window, timeline, history, idle, gpuName, onMove }) {
  const [width, setWidth] = useState(0);
  const [chosen, setChosen] = useState(/** @type {{ lane: string, part: string } | null} */ (null));
  const area = useRef(/** @type {any} */ (null));
  const nowS = nowMs() / 1000;
  const found = findBar(stack, chosen) ?? lastBar(stack, window);
  useMeasured(area, setWidth);
  useDrawing(area, { stack, window, timeline, idle, width, nowS });
  const drag = useMoving(area, { window, width, nowS, onMove });
  const choose = (next) => setChosen(next && { lane: next.place.lane.key, part: partOf(next.bar) });
  const pointed = (event) => {
    if (drag.current?.moves || event.pointerType === "touch") return;
    const box = area.current.getBoundingClientRect();
    choose(barAt(stack, window, width, event.clientX - box.left, event.clientY - box.top - QUEUE_PX, nowS));
  };
  const pressed = (event) => {
    const next = keyed(event, { stack, found, window, nowS, onMove });
    if (next === undefined) return;
    event.preventDefault();
    if (next) {
      choose(next);
      const seen = next.bar.from < window[1] && endOf(next.bar, nowS) > window[0];
      if (!seen) onMove(moved(window, next.bar.from - (window[0] + window[1]) / 2, nowS));
    }
  };
  const left = () => {
    if (!area.current.contains(document.activeElement)) setChosen(null);
  };
  return html`<div class="timeline">
    <${Names} stack=${stack} />
    <div class="timeline-right">
      <${Axis} window=${window} width=${width} nowS=${nowS} />
      <div class="timeline-area" ref=${area} style=${{ height: `${QUEUE_PX + stack.height}px` }} onPointerMove=${pointed} onPointerLeave=${left}>
        <canvas aria-hidden="true"></canvas>
        ${found && html`<${Cursor} ...${{ found, window, width, nowS, gpuName, drag }} shown=${chosen !== null} onFocus=${() => choose(found)} onBlur=${() => setChosen(null)} onKeyDown=${pressed} />`}
        ${found && chosen && html`<${Tip} ...${{ found, window, width, nowS, history, gpuName }} />`}
      </div>
    </div>
  </div>`;
}

const Names = ({ stack }) =>
  useMemo(
    () => html`<div class="timeline-names">
    <span class="timeline-name quiet" style=${{ top: "0px", height: `${QUEUE_PX}px` }}>Queue</span>
    ${stack.headings.map(({ text, top }) => html`<b class="timeline-name" key=${text} style=${{ top: `${QUEUE_PX + top}px`, height: "24px" }}>${text}</b>`)}
    ${stack.places.map(({ lane, top, height }) => html`<span class="timeline-name" key=${lane.key} style=${{ top: `${QUEUE_PX + top}px`, height: `${height}px` }}>${lane.user ? html`<${User} name=${lane.name} />` : html`<${Link} view="gpus" id=${lane.uuid} title=${lane.title}>${lane.name}<//>`}</span>`)}
  </div>`,
    [stack],
  );

function Axis({ window, width, nowS }) {
  const x = (at) => ((at - window[0]) / (window[1] - window[0])) * width;
  const now = x(nowS);
  return html`<div class="timeline-axis" aria-hidden="true">
    ${ticks(window, width)
      .filter(({ at, text }) => !overlaps(x(at), text, now) && !overlaps(x(at), text, width))
      .map(
        ({ at, text, day }) =>
          html`<span key=${at} class=${day ? "day" : ""} style=${{ left: `${x(at)}px` }}>${text}</span>`,
      )}
    ${now >= 0 && now <= width && html`<span class="now-mark" style=${{ left: `${Math.min(now, width - LABEL_PX)}px` }}>now</span>`}
  </div>`;
}

/** True if the text of a tick would lie on a label in the middle of which is `at`. */
function overlaps(left, text, at) {
  return left < at + LABEL_PX && left + LETTER_PX * text.length > at - LABEL_PX;
}

/** The link to the bar that is pointed at or has the focus: it lies on it. */
function Cursor({ found, window, width, nowS, gpuName, drag, shown, onFocus, onBlur, onKeyDown }) {
  const { place, bar } = found;
  const perSecond = width / (window[1] - window[0]);
  const left = Math.max(0, (bar.from - window[0]) * perSecond);
  const right = Math.min(width, (endOf(bar, nowS) - window[0]) * perSecond);
  const row = Math.max(
    0,
    place.lane.bars.findIndex((bars) => bars.includes(bar)),
  );
  const style = {
    left: `${left}px`,
    width: `${Math.max(3, right - left)}px`,
    top: `${QUEUE_PX + place.top + row * place.rowHeight}px`,
    height: `${place.rowHeight}px`,
  };
  const { view, id } = targetOf(bar);
  const clicked = (event) => {
    if (drag.current?.moves) event.preventDefault();
  };
  return html`<a class=${`timeline-cursor${shown ? " is-shown" : ""}`} href=${address(view, id)} draggable=${false} style=${style} aria-label=${spoken(found, gpuName, nowS)} onFocus=${onFocus} onBlur=${onBlur} onKeyDown=${onKeyDown} onClick=${clicked}></a>`;
}

/** What a bar is, in words. */
function spoken({ place, bar }, gpuName, nowS) {
  const until = bar.open ? "still held" : `until ${moment(1000 * bar.to)}`;
  const where = place.lane.user
    ? `GPU ${bar.span.gpus.map(gpuName).join(", ")}`
    : `${place.lane.name}${place.lane.title ? ` of ${plain(place.lane.node)}` : ""}`;
  return `${where}: ${bar.text || bar.span.lease_id}, from ${moment(1000 * bar.from)}, ${until}, ${duration(endOf(bar, nowS) - bar.from)}`;
}

function Tip({ found, window, width, nowS, history, gpuName }) {
  const { place, bar } = found;
  const { span } = bar;
  const perSecond = width / (window[1] - window[0]);
  const middle = ((Math.max(window[0], bar.from) + Math.min(window[1], endOf(bar, nowS))) / 2 - window[0]) * perSecond;
  const left = Math.max(0, Math.min(width - TIP_PX, middle - TIP_PX / 2));
  const used = usedShare(history, { ...bar, to: endOf(bar, nowS) });
  return html`<div class="timeline-tip" role="status" style=${{ left: `${left}px`, top: `${QUEUE_PX + place.top + place.height + 4}px` }}>
    <p><${User} name=${span.user ?? "?"} /> <strong>${bar.text.slice((span.user ?? "").length).trim()}</strong></p>
    <p>GPU ${plain(span.gpus.map(gpuName).join(", "), 120)}</p>
    <p>${moment(1000 * bar.from)} to ${bar.open ? "now" : moment(1000 * bar.to)}, ${duration(endOf(bar, nowS) - bar.from)}</p>
    <p class="quiet">${used === null ? "use not known" : `${percent(used)} used`}${span.end_reason ? `, ${plain(span.end_reason.replaceAll("_", " "))}` : ""}</p>
  </div>`;
}

function findBar(stack, chosen) {
  if (!chosen) return null;
  const place = stack.places.find(({ lane }) => lane.key === chosen.lane);
  const bar = place?.lane.bars.flat().find((one) => partOf(one) === chosen.part);
  return place && bar ? { place, bar } : null;
}

/** Where the keyboard begins: the last bar of the first lane that has one in the window. */
function lastBar(stack, window) {
  for (const place of stack.places) {
    const bar = place.lane.bars[0]?.findLast((one) => one.from < window[1] && (one.open || one.to > window[0]));
    if (bar) return { place, bar };
  }
  return null;
}

/** What a key does: the bar that is chosen next, null for none, undefined if the key means nothing here. */
function keyed(event, { stack, found, window, nowS, onMove }) {
  const { key, shiftKey } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const length = window[1] - window[0];
  const middle = (window[0] + window[1]) / 2;
  if (key === "+" || key === "-") onMove(zoomed(window, key === "+" ? 1 / ZOOM : ZOOM, middle, nowS));
  else if (shiftKey && key === "ArrowLeft") onMove(moved(window, -length / 4, nowS));
  else if (shiftKey && key === "ArrowRight") onMove(moved(window, length / 4, nowS));
  else if (key.startsWith("Arrow")) return neighbour(stack, found, key, window);
  else return undefined;
  return null;
}

function useMeasured(area, setWidth) {
  useLayoutEffect(() => {
    const sized = new ResizeObserver(() => setWidth(area.current?.clientWidth ?? 0));
    sized.observe(area.current);
    setWidth(area.current.clientWidth);
    return () => sized.disconnect();
  }, []);
}

function useDrawing(area, { stack, window, timeline, idle, width, nowS }) {
  const palette = useRef(/** @type {any} */ (null));
  const dark = isDark();
  const queue = useMemo(
    () => timeline.queue.map(({ at, length }) => ({ at: Date.parse(at) / 1000, length })),
    [timeline.queue],
  );
  useLayoutEffect(() => {
    palette.current = null;
  }, [dark]);
  useLayoutEffect(() => {
    const canvas = area.current.querySelector("canvas");
    if (!width) return;
    palette.current ??= paletteOf(area.current, canvas.getContext("2d"));
    const height = QUEUE_PX + stack.height;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const completeS = timeline.complete_since ? Date.parse(timeline.complete_since) / 1000 : null;
    const places = stack.places.map((place) => ({ ...place, top: place.top + QUEUE_PX }));
    const picture = {
      stack: { ...stack, places },
      window,
      width,
      height,
      nowS,
      idle,
      completeS,
      queue,
      queueTop: 0,
      queueHeight: QUEUE_PX,
    };
    canvas.picture = picture;
    drawTimeline(canvas, palette.current, picture);
  });
}

/** Drag moves the window, two fingers and the wheel with Ctrl zoom it, the wheel with Shift moves it. */
function useMoving(area, given) {
  const drag = useRef(/** @type {any} */ (null));
  const latest = useRef(given);
  latest.current = given;
  useEffect(() => {
    const place = area.current;
    const pointers = new Map();
    const down = (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, event.clientX);
      drag.current = { window: latest.current.window, from: [...pointers.values()], moves: false };
    };
    const move = (event) => {
      if (!pointers.has(event.pointerId)) return;
      pointers.set(event.pointerId, event.clientX);
      const { width, nowS, onMove } = latest.current;
      const { window, from } = drag.current;
      const to = [...pointers.values()];
      if (!drag.current.moves && Math.abs(to[0] - from[0]) < DRAG_PX) return;
      if (!drag.current.moves) place.setPointerCapture(event.pointerId);
      drag.current.moves = true;
      const perPixel = (window[1] - window[0]) / width;
      if (to.length === 1) return onMove(moved(window, (from[0] - to[0]) * perPixel, nowS));
      const factor = Math.abs(from[1] - from[0]) / Math.max(20, Math.abs(to[1] - to[0]));
      const middle = (from[0] + from[1]) / 2 - place.getBoundingClientRect().left;
      return onMove(zoomed(window, factor, window[0] + middle * perPixel, nowS));
    };
    const up = (event) => {
      pointers.delete(event.pointerId);
      const ended = drag.current;
      if (!pointers.size) setTimeout(() => drag.current === ended && (drag.current = null)); // after the click
    };
    const turned = (event) => {
      const { window, width, nowS, onMove } = latest.current;
      const perPixel = (window[1] - window[0]) / width;
      const sideways = event.shiftKey ? event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        const at = window[0] + (event.clientX - place.getBoundingClientRect().left) * perPixel;
        onMove(zoomed(window, Math.exp(event.deltaY / 300), at, nowS));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        onMove(moved(window, sideways * perPixel, nowS));
      } else return;
      event.preventDefault();
    };
    const heard = { pointerdown: down, pointermove: move, pointerup: up, pointercancel: up };
    for (const [name, does] of Object.entries(heard)) place.addEventListener(name, does);
    place.addEventListener("wheel", turned, { passive: false });
    return () => {
      for (const [name, does] of Object.entries(heard)) place.removeEventListener(name, does);
      place.removeEventListener("wheel", turned);
    };
  }, []);
  return drag;
}
