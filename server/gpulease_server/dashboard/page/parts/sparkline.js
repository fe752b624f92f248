// The last hour of one GPU as a small area. An unknown bucket is a gap, never 0.

import { html, useMemo } from "../html.js";

/** The runs of known values: each a list of `[index, value]`. */
export function runs(values) {
  const found = [];
  let run = [];
  values.forEach((value, index) => {
    if (value !== null) run.push([index, value]);
    else if (run.length) {
      found.push(run);
      run = [];
    }
  });
  if (run.length) found.push(run);
  return found;
}

/** Ratios, oldest first, over the whole width. The page is drawn every second, and values come once a minute. */
export function Sparkline({ values, label }) {
  return useMemo(() => drawn(values, label), [values, label]);
}

function drawn(values, label) {
  const width = Math.max(1, values.length - 1);
  const y = (value) => (1 - Math.min(1, value)) * 30 + 1;
  const line = (run) => run.map(([x, value]) => `${x} ${y(value).toFixed(2)}`).join("L");
  const found = runs(values);
  const areas = found.map((run) => `M${run[0][0]} 32L${line(run)}L${run.at(-1)[0]} 32z`).join("");
  const lines = found.map((run) => `M${line(run)}${run.length === 1 ? "h-.6" : ""}`).join("");
  return html`<svg class="spark" viewBox=${`0 0 ${width} 32`} preserveAspectRatio="none" role="img" aria-label=${label} data-values=${values.map((value) => value ?? "").join(" ")}>
    <path class="base" d=${`M0 31.5h${width}`} /><path class="area" d=${areas} /><path class="line" d=${lines} />
  </svg>`;
}
