// The queue: who waits, for what, how long, and why.

import { askedFor, duration, ordinal, plain } from "../format.js";
import { nowMs } from "../clock.js";
import { html, useState } from "../html.js";
import { gpuNames, jobName, preemptedTimes, queueViews, userOf } from "../model.js";
import { Bell } from "../parts/bell.js";
import { Dialog } from "../parts/dialog.js";
import { Link, Moment, More, Since, User } from "../parts/marks.js";
import { ReservationsSection } from "../parts/reservations.js";
import { setQuery } from "../route.js";
import { Why } from "./why.js";

const FIRST_ROWS = 50;
const MAX_ROWS = 1000;
/** Requests by how many GPUs they want on a node. */
const SIZES = { "1 GPU": [1, 1], "2 to 4": [2, 4], "5 and more": [5, Infinity] };

/** The whole view. */
export function Queue({ data, q, query }) {
  const [asked, setAsked] = useState(/** @type {any} */ (null));
  const all = query.all === "yes"; // in the address, so that Back shows them again
  /** @type {any[]} */
  const views = queueViews(data, q).filter((lease) => isOfSize(lease.demand, query.size));
  const nameOf = gpuNames(data);
  const tellsWhen = views.some((lease) => lease.expected_at || lease.expected_from); // else the column says nothing
  const shown = views.slice(0, all ? MAX_ROWS : FIRST_ROWS);
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Queue</h1>
      ${data.queued.items.length > 1 && html`<div class="choice" role="group" aria-label="Size">${Object.keys(SIZES).map((size) => html`<button type="button" key=${size} aria-pressed=${size === query.size} onClick=${() => setQuery({ size: size === query.size ? "" : size })}>${size}</button>`)}</div>`}
      <span class="facts">${views.length ? `${views.length} waiting` : ""}</span></div>
    <${MyNext} views=${views} me=${data.me} />
    ${views.length === 0 && html`<p class="none">${q || query.size ? "No request in the queue matches." : "The queue is empty."}</p>`}
    ${
      views.length > 0 &&
      html`<table id="queue"><thead><tr>
      <th scope="col" class="number">#</th><th scope="col">Who</th><th scope="col">Wants</th><th scope="col">Waiting</th>${tellsWhen && html`<th scope="col">Expected</th>`}<th scope="col">Lease</th><th scope="col"><span class="unseen">Explanation</span></th>
    </tr></thead><tbody>
      ${shown.map((lease) => html`<${Row} key=${lease.id} lease=${lease} nameOf=${nameOf} tellsWhen=${tellsWhen} mine=${isMine(lease, data.me)} onWhy=${() => setAsked(lease.id)} />`)}
    </tbody></table>`
    }
    ${!all && views.length > FIRST_ROWS && html`<p class="all"><button type="button" onClick=${() => setQuery({ all: "yes" })}>Show ${views.length > MAX_ROWS ? MAX_ROWS : `all ${views.length}`}</button></p>`}
    ${(all || data.queued.more) && html`<${More} hidden=${views.length - shown.length} atLeast=${data.queued.more} />`}
    ${asked && html`<${Dialog} title=${`Why does ${asked} wait?`} onClose=${() => setAsked(null)}><${Why} leaseId=${asked} nameOf=${nameOf} /><//>`}
  </section>
  <${ReservationsSection} data=${data} q=${q} />`;
}

function isOfSize({ selection, count, indices, uuids }, size) {
  if (!Object.hasOwn(SIZES, size)) return true;
  const wanted = selection === "listed" ? indices.length + uuids.length : selection === "count" ? count : Infinity;
  return wanted >= SIZES[size][0] && wanted <= SIZES[size][1];
}

function isMine(lease, me) {
  return me !== null && me !== undefined && lease.holder.user === me.user;
}

/** The first request of the caller: what they came for. */
function MyNext({ views, me }) {
  const mine = views.filter((lease) => isMine(lease, me));
  if (!mine.length || views.length < 2) return null;
  const [lease] = mine;
  const place = lease.position === null ? "in the queue" : `${ordinal(lease.position)} in the queue`;
  return html`<p class="my-next">Your next: <${Link} view="leases" id=${lease.id}>${lease.job ? jobName(lease.job) : plain(lease.holder.label, 40) || lease.id}<//>, ${place}${lease.expected_at || lease.expected_from ? html`, expected <${Expected} lease=${lease} />` : null}${mine.length > 1 ? `, and ${mine.length - 1} more of yours` : ""}.</p>`;
}

/** What is said of when a request starts, by what that rests on. */
const BASES = { declared: "by declared times", history: "by how long earlier leases lasted" };

/** When the daemon expects a grant, or between which times, and on what that rests; it may not know. */
function Expected({ lease }) {
  const basis = plain(lease.expected_basis ?? "", 120);
  const inTime = (at) => duration(Math.max(0, (Date.parse(at) - nowMs()) / 1000));
  if (!lease.expected_at && lease.expected_from) {
    return html`<${Moment} at=${lease.expected_from} /> to <${Moment} at=${lease.expected_until} /> <span class="quiet">in ${inTime(lease.expected_from)} to ${inTime(lease.expected_until)}, ${BASES[basis] ?? basis}</span>`;
  }
  if (!lease.expected_at) return html`<span class="quiet">unknown</span>`;
  return html`<${Moment} at=${lease.expected_at} /> <span class="quiet">in ${inTime(lease.expected_at)}, ${BASES[basis] ?? basis}</span>`;
}

function Row({ lease, nameOf, tellsWhen, mine, onWhy }) {
  const label = lease.job ? "" : plain(lease.holder.label, 60);
  return html`<tr class=${mine ? "mine" : ""}>
    <td data-label="#" class="number">${lease.position ?? "-"}</td>
    <td data-label="Who" class="whom"><${User} name=${userOf(lease.holder) || "?"} /> ${label && html`<${Link} view="leases" id=${lease.id}>${label}<//>`} ${lease.job && html`<${Link} view="jobs" id=${lease.job.id}>${jobName(lease.job)}<//>`} ${lease.job?.preempted > 0 && html`<span class="quiet nowrap">${preemptedTimes(lease.job)}</span>`}</td>
    <td data-label="Wants">${askedFor(lease.demand, nameOf)}${lease.demand.time_s ? html` <span class="quiet nowrap">for ${duration(lease.demand.time_s)}</span>` : null}</td>
    <td data-label="Waiting" class="nowrap"><${Since} at=${lease.created_at} /></td>
    ${tellsWhen && html`<td data-label="Expected"><${Expected} lease=${lease} /></td>`}
    <td data-label="Lease" class="lease"><${Link} view="leases" id=${lease.id} class="id">${lease.id}<//></td>
    <td class="action">${mine && html`<${Bell} leaseId=${lease.id} />`}<button type="button" onClick=${onWhy} aria-label=${`Why does ${lease.id} wait?`}>Why?</button></td>
  </tr>`;
}
