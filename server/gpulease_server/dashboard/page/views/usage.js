// GPU-hours of the last day by user: held, and used of that.

import { nowMs } from "../clock.js";
import { html } from "../html.js";
import { useAnswer } from "../parts/answers.js";
import { User } from "../parts/marks.js";

const DAY_MS = 86_400_000;
const GRAIN_MS = 600_000; // the address changes rarely, so that the daemon's answers are used again
const ROWS = 5;

/** Bars that share one axis from 0. */
export function UsageToday() {
  const from = new Date(Math.floor((nowMs() - DAY_MS) / GRAIN_MS) * GRAIN_MS).toISOString().replace(".000", "");
  const { value } = useAnswer(`v1/usage?by=user&from=${from}`, 60_000);
  if (!value?.shares?.length) return null;
  const most = Math.max(...value.shares.map((share) => share.gpu_hours_held), 0.01);
  return html`<section class="sheet" aria-labelledby="usage">
    <div class="head"><h2 id="usage">GPU-hours, last 24 h</h2><span class="facts">held / used</span></div>
    <table class="slim usage"><thead class="unseen"><tr><th scope="col">User</th><th scope="col">Share</th><th scope="col">Hours</th></tr></thead>
    <tbody>${value.shares.slice(0, ROWS).map(
      (share) => html`<tr key=${share.key}>
      <td class="cut"><${User} name=${share.key ?? "?"} /></td>
      <td class="wide"><svg class="held" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
        <rect class="outline" width=${(100 * share.gpu_hours_held) / most} height="12" />
        ${share.gpu_hours_used !== null && html`<rect class="fill" width=${(100 * share.gpu_hours_used) / most} height="12" />`}
      </svg></td>
      <td class="nowrap number">${gpuHours(share.gpu_hours_held)} / ${gpuHours(share.gpu_hours_used)}</td>
    </tr>`,
    )}</tbody></table>
  </section>`;
}

/** GPU-hours in a few digits; ? if unknown. */
export function gpuHours(value) {
  if (value === null || value === undefined) return "?";
  if (value >= 10) return String(Math.round(value));
  return value.toFixed(value < 1 ? 2 : 1);
}
