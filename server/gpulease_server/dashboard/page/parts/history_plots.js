// The plots of a GPU or a lease, from the history that the daemon keeps. Where it keeps none, nothing is drawn.

import { html, useMemo } from "../html.js";
import { setQuery } from "../route.js";
import { Trouble, useAnswer } from "./answers.js";
import { Plots } from "./plots.js";

const RANGES = { "1h": 3600, "24h": 86_400, "7d": 604_800 };
const EVERY_MS = 5000;
const MEASURES = ["utilization_ratio", "memory_used_bytes", "power_w", "temperature_c"];

/** Plots of `path`: of a GPU with a choice of the time, of a lease its whole life. */
export function HistoryPlots({ path, query, label, live = true }) {
  const ofGpu = path.endsWith("/history");
  const range = Object.hasOwn(RANGES, query.range) ? query.range : "1h";
  const answer = useAnswer(
    ofGpu ? `${path}?last_s=${RANGES[range]}&points=300` : `${path}?points=300`,
    live ? EVERY_MS : null,
  );
  const { value, problem } = answer;
  const lines = useMemo(() => (value ? (ofGpu ? [gpuLine(value, label)] : leaseLines(value)) : []), [value, label]);
  if (problem?.status === 404) return null;
  return html`<section class="sheet" aria-labelledby="plots-title"><div class="head"><h2 id="plots-title">Readings</h2>
      ${ofGpu && html`<div class="choice" role="group" aria-label="Time">${Object.keys(RANGES).map((name) => html`<button type="button" key=${name} aria-pressed=${name === range} onClick=${() => setQuery({ range: name, from: "", to: "" })}>${name}</button>`)}</div>`}</div>
    <${Trouble} answer=${answer} />
    ${!problem && !value && html`<p class="none">Loading...</p>`}
    ${lines.length > 0 && html`<${Plots} lines=${lines} zoom=${zoomOf(query)} onZoom=${zoomTo} group=${path} />`}
  </section>`;
}

function gpuLine(value, label) {
  const startS = Date.parse(value.from_at) / 1000;
  const times = value.utilization_ratio.mean.map((_, at) => startS + (at + 0.5) * value.bucket_s);
  return { label, times, ...Object.fromEntries(MEASURES.map((key) => [key, value[key]])) };
}

function leaseLines(value) {
  return (value.gpus ?? []).map((gpu) => metricsLine(gpu, `GPU ${gpu.index}`));
}

/** A GPU of the metrics of a job or a lease, for `Plots`: each bucket is drawn at its middle. */
export function metricsLine(gpu, label) {
  const times = gpu.start_at.map((at, index) => Date.parse(at) / 1000 + gpu.seconds[index] / 2);
  return { label, times, ...Object.fromEntries(MEASURES.map((key) => [key, gpu[key]])) };
}

const END_S = 2 ** 36; // far from where times have no form any more

/** The zoom that an address has. */
export function zoomOf({ from, to }) {
  const zoom = [Number(from), Number(to)];
  return from && to && zoom[0] >= 0 && zoom[1] > zoom[0] && zoom[1] < END_S ? zoom : null;
}

/** Put a zoom into the address; null takes it out. */
export function zoomTo(zoom) {
  setQuery({ from: zoom?.[0] ?? "", to: zoom?.[1] ?? "" });
}
