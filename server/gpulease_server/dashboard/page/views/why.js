// Why a request waits, GPU by GPU.

import { duration, ordinal, plain } from "../format.js";
import { html } from "../html.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { Link, Moment, More, User } from "../parts/marks.js";

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
    <p>${value.verdict !== "granted" && html`<strong>${verdictOf(value)}</strong> `}${facts.filter(Boolean).join(" ")}</p>
    ${value.preempts && html`<${Preempts} preempts=${value.preempts} nameOf=${nameOf} />`}
    ${value.behind.length > 0 && html`<p>Behind ${leaseLinks(value.behind)}.</p>`}
    ${value.recent_usage?.length > 0 && html`<${RecentUsage} usages=${value.recent_usage} />`}
    ${value.obstacles.length > 0 && html`<${Obstacles} obstacles=${value.obstacles} unlisted=${value.unlisted_gpus ?? 0} />`}
  </div>`;
}

/** What ends so that the request can start, and where. */
function Preempts({ preempts: { leases, by, gpus }, nameOf }) {
  const where = gpus.length ? `It is to start on GPU ${gpus.slice(0, MAX_OBSTACLES).map(nameOf).join(", ")}.` : "";
  if (!leases.length) return where && html`<p>Nothing more ends for it. ${where}</p>`;
  return html`<p>It preempts ${leaseLinks(leases)}, by <${Moment} at=${by} />. ${where}</p>`;
}

function leaseLinks(ids) {
  return ids
    .slice(0, MAX_OBSTACLES)
    .map((id, at) => html`${at ? ", " : ""}<${Link} view="leases" id=${id} class="id">${id}<//>`);
}

/** What orders the requests of one priority: where groups have a share, their usage first, beside that of users in none. */
function RecentUsage({ usages }) {
  const users = html`${usages.map(({ user, gpu_hours: hours }, at) => html`${at ? ", " : ""}${user ? html`<${User} name=${user} />` : "?"} ${hours.toFixed(1)}`)} GPU-hours.`;
  if (!usages.some(({ group }) => group)) {
    return html`<p>Recent usage, by which requests of one priority are ordered: ${users}</p>`;
  }
  const first = [...new Map(usages.map((one) => [one.group ? `group ${one.group}` : one.user, one])).values()];
  return html`<p>Recent usage, by which requests of one priority are ordered, that of groups first: ${first.map((one, at) => html`${at ? ", " : ""}${one.group ? groupUsage(one) : html`<${User} name=${one.user || "?"} /> ${one.gpu_hours.toFixed(1)}`}`)} GPU-hours.</p>
    <p>In a group, and where groups have about as much, by user: ${users}</p>`;
}

/** The usage of a group, as the explanation's sentence has it. */
function groupUsage({ group, group_gpu_hours: hours, group_share: share }) {
  const each = share === 1 ? "" : ` (${(hours / share).toFixed(1)} for each of ${share} users)`;
  return `group ${plain(group)} ${hours.toFixed(1)}${each}`;
}

function Obstacles({ obstacles, unlisted }) {
  return html`<table><thead><tr><th scope="col">GPU</th><th scope="col">Why not</th></tr></thead>
    <tbody>${obstacles.slice(0, MAX_OBSTACLES).map(
      (one) => html`<tr key=${one.uuid}>
      <td data-label="GPU" class="nowrap"><${Link} view="gpus" id=${one.uuid}>${one.index} of ${plain(one.node)}<//></td>
      <td data-label="Why not">${withoutPlace(one)}</td>
    </tr>`,
    )}</tbody></table>
    <${More} hidden=${Math.max(0, obstacles.length - MAX_OBSTACLES) + unlisted} />`;
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
