// Why a request waits, GPU by GPU.

import { duration, ordinal, plain } from "../format.js";
import { html } from "../html.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { Link, More, User } from "../parts/marks.js";

const MAX_OBSTACLES = 200;
const EVERY_MS = 5000;
const VERDICTS = { granted: "Granted.", not_now: "Waiting.", never: "Never.", ended: "Ended." };

/** The daemon's explanation, asked again while it is shown. */
export function Why({ leaseId, nameOf }) {
  const answer = useAnswer(`v1/leases/${encodeURIComponent(leaseId)}/explain`, EVERY_MS);
  const { value } = answer;
  if (answer.problem && !value) return html`<${Trouble} answer=${answer} />`;
  if (!value) return html`<p class="none">Loading...</p>`;
  if (!Array.isArray(value.obstacles))
    return html`<p class="problem" role="alert">Something other than the daemon answers.</p>`;
  const facts = [];
  if (value.passed) facts.push(`${newer(value.passed)} started first in the last ${duration(value.passed_s ?? 0)}.`);
  if (value.held.length)
    facts.push(`Reserved for it: GPU ${value.held.slice(0, MAX_OBSTACLES).map(nameOf).join(", ")}.`);
  if (value.verdict !== "not_now" || value.obstacles.length === 0) facts.push(plain(value.sentence, 2000));
  return html`<div class="why"><${Trouble} answer=${answer} />
    <p><strong>${verdictOf(value)}</strong> ${facts.join(" ")}</p>
    ${value.behind.length > 0 && html`<p>Behind ${value.behind.slice(0, MAX_OBSTACLES).map((id, at) => html`${at ? ", " : ""}<${Link} view="leases" id=${id} class="id">${id}<//>`)}.</p>`}
    ${value.recent_usage?.length > 0 && html`<p>Recent usage, by which requests of one priority are ordered: ${value.recent_usage.map(({ user, gpu_hours: hours }, at) => html`${at ? ", " : ""}${user ? html`<${User} name=${user} />` : "?"} ${hours.toFixed(1)}`)} GPU-hours.</p>`}
    ${value.obstacles.length > 0 && html`<${Obstacles} obstacles=${value.obstacles} />`}
  </div>`;
}

function Obstacles({ obstacles }) {
  return html`<table><thead><tr><th scope="col">GPU</th><th scope="col">Why not</th></tr></thead>
    <tbody>${obstacles.slice(0, MAX_OBSTACLES).map(
      (one) => html`<tr key=${one.uuid}>
      <td data-label="GPU" class="nowrap"><${Link} view="gpus" id=${one.uuid}>${one.index} of ${plain(one.node)}<//></td>
      <td data-label="Why not">${withoutPlace(one)}</td>
    </tr>`,
    )}</tbody></table>
    <${More} hidden=${obstacles.length - MAX_OBSTACLES} />`;
}

function verdictOf({ verdict, position }) {
  if (verdict === "not_now" && position !== null) return `Waiting, ${ordinal(position)} in the queue.`;
  return VERDICTS[verdict] ?? plain(verdict);
}

function newer(count) {
  return count === 1 ? "1 newer request" : `${count} newer requests`;
}

/** The sentence without the GPU that it begins with, which the row has named. */
function withoutPlace({ sentence, index, node }) {
  const named = `GPU ${index} of ${node} `;
  const rest = sentence.startsWith(named) ? sentence.slice(named.length) : sentence;
  return plain(rest.charAt(0).toUpperCase() + rest.slice(1), 400);
}
