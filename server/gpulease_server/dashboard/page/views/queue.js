// The queue: who waits, for what, how long, and why.

import { askedFor, plain } from "../format.js";
import { html, useState } from "../html.js";
import { gpuNames, jobName, queueViews, userOf } from "../model.js";
import { Dialog } from "../parts/dialog.js";
import { Link, More, Since, User } from "../parts/marks.js";
import { Why } from "./why.js";

const MAX_ROWS = 200;

/** The whole view. */
export function Queue({ data, q }) {
  const [asked, setAsked] = useState(/** @type {any} */ (null));
  const views = queueViews(data, q);
  const nameOf = gpuNames(data);
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Queue</h1><span class="facts">${views.length ? `${views.length} waiting` : ""}</span></div>
    ${views.length === 0 && html`<p class="none">${q ? "No request in the queue matches." : "The queue is empty."}</p>`}
    ${
      views.length > 0 &&
      html`<table id="queue"><thead><tr>
      <th scope="col" class="number">#</th><th scope="col">Who</th><th scope="col">Wants</th><th scope="col">Waiting</th><th scope="col">Lease</th><th scope="col"><span class="unseen">Explanation</span></th>
    </tr></thead><tbody>
      ${views.slice(0, MAX_ROWS).map((lease) => html`<${Row} key=${lease.id} lease=${lease} nameOf=${nameOf} mine=${isMine(lease, data.me)} onWhy=${() => setAsked(lease.id)} />`)}
    </tbody></table>`
    }
    <${More} hidden=${views.length - MAX_ROWS} atLeast=${data.queued.more} />
    ${asked && html`<${Dialog} title=${`Why does ${asked} wait?`} onClose=${() => setAsked(null)}><${Why} leaseId=${asked} nameOf=${nameOf} /><//>`}
  </section>`;
}

function isMine(lease, me) {
  return me !== null && me !== undefined && lease.holder.user === me.user;
}

function Row({ lease, nameOf, mine, onWhy }) {
  const label = lease.job ? "" : plain(lease.holder.label, 60);
  return html`<tr class=${mine ? "mine" : ""}>
    <td data-label="#" class="number">${lease.position ?? "-"}</td>
    <td data-label="Who"><${User} name=${userOf(lease.holder) || "?"} /> ${label && html`<span>(${label})</span>`} ${lease.job && html`<${Link} view="jobs" id=${lease.job.id}>${jobName(lease.job)}<//>`}</td>
    <td data-label="Wants">${askedFor(lease.demand, nameOf)}</td>
    <td data-label="Waiting" class="nowrap"><${Since} at=${lease.created_at} /></td>
    <td data-label="Lease"><${Link} view="leases" id=${lease.id} class="id">${lease.id}<//></td>
    <td class="action"><button type="button" onClick=${onWhy} aria-label=${`Why does ${lease.id} wait?`}>Why?</button></td>
  </tr>`;
}
