// One lease: who asked for what, what was granted, and why it waits or ended.

import { nowMs } from "../clock.js";
import { askedFor, duration, plain } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { eventPlace, gpuNames, IDLE_SHOWN_S, until, userOf } from "../model.js";
import { Action, may } from "../parts/action.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { HistoryPlots } from "../parts/history_plots.js";
import { Link, Moment, Since, State, User } from "../parts/marks.js";
import { EventLine } from "./events.js";
import { Pair } from "./gpu.js";
import { Why } from "./why.js";

const EVERY_MS = 3000;

/** What a release ends. */
function ends(lease) {
  if (lease.state === "queued") return "The request leaves the queue.";
  const whose = lease.job_id
    ? `Job ${lease.job_id} runs under it, and ends.`
    : "Whatever still runs on them is in the way of the next user.";
  return `Its ${lease.gpus.length === 1 ? "GPU is" : `${lease.gpus.length} GPUs are`} given back. ${whose}`;
}

/** The whole view. */
export function LeasePage({ data, id, query }) {
  const [over, setOver] = useState(false); // an ended lease does not change
  const answer = useAnswer(`v1/leases/${encodeURIComponent(id)}`, over ? null : EVERY_MS);
  const { value: lease, again } = answer;
  useEffect(() => setOver(lease?.state === "ended"), [lease?.state]);
  const path = lease && `v1/events?lease=${encodeURIComponent(id)}&order=desc&limit=50`;
  const events = useAnswer(path, over ? null : EVERY_MS);
  const head = html`<h1 id="title" tabindex="-1">Lease <span class="id">${plain(id)}</span></h1>`;
  if (!lease)
    return html`<section class="sheet"><div class="head">${head}</div>${answer.problem ? html`<${Trouble} answer=${answer} />` : html`<p class="none">Loading...</p>`}</section>`;
  const nameOf = gpuNames(data);
  const devices = new Map(data.gpus.items.map((one) => [one.uuid, one]));
  return html`
    <section class="sheet" aria-labelledby="title">
      <div class="head">${head}<${State} state=${lease.state} />
        ${
          may(data.me, "releaseLease", lease.holder.user) &&
          html`<${Action} verb="Release" offered=${lease.state !== "ended"} subject=${`lease ${id}`} path=${`v1/leases/${encodeURIComponent(id)}/release`} onDone=${again}
          body=${() => (lease.token === null ? {} : { token: lease.token })} consequence=${ends(lease)} />`
        }
      </div>
      <${Trouble} answer=${answer} />
      <dl class="pairs">
        <${Pair} name="Holder"><${User} name=${userOf(lease.holder) || "?"} /> ${plain(lease.holder.label, 80)}<//>
        ${lease.job_id && html`<${Pair} name="Job"><${Link} view="jobs" id=${lease.job_id}>${lease.job_id}<//><//>`}
        <${Pair} name="Wants">${askedFor(lease.demand, nameOf)}<//>
        ${lease.gpus.length > 0 && html`<${Pair} name="GPUs">${lease.gpus.map((gpu, at) => html`${at ? ", " : ""}<${Link} view="gpus" id=${gpu.uuid}>${gpu.index} of ${plain(gpu.node)}<//>`)}<//>`}
        <${Pair} name="Asked for"><${Moment} at=${lease.created_at} /><//>
        <${Pair} name="Granted">${lease.granted_at ? html`<${Moment} at=${lease.granted_at} /> <span class="quiet">after ${duration((Date.parse(lease.granted_at) - Date.parse(lease.created_at)) / 1000)}</span>` : "-"}<//>
        ${lease.state === "active" && html`<${Pair} name="Ends">${until(lease, nowMs()) || "when it is released"}<//>`}
        ${lease.ends_at && lease.demand.time_s && html`<${Pair} name="Time">${duration(lease.demand.time_s)}, until <${Moment} at=${lease.ends_at} /><//>`}
        ${lease.idle_s >= IDLE_SHOWN_S && html`<${Pair} name="Idle">no work for ${duration(lease.idle_s)}<//>`}
        ${lease.preempt_at && html`<${Pair} name="Preempted">by <${Moment} at=${lease.preempt_at} />, for a request that waits<//>`}
        ${lease.reclaim_at && html`<${Pair} name="Taken back">at <${Moment} at=${lease.reclaim_at} />, unless its GPUs work or are kept<//>`}
        ${lease.kept && html`<${Pair} name="Kept">until <${Moment} at=${lease.kept.until} />: ${plain(lease.kept.reason, 500)}<//>`}
        ${lease.ended_at && html`<${Pair} name="Ended"><${Moment} at=${lease.ended_at} />, ${plain((lease.end_reason ?? "").replaceAll("_", " "))}, ${lease.granted_at ? "held" : "waited"} for <${Since} at=${lease.granted_at ?? lease.created_at} to=${lease.ended_at} /><//>`}
      </dl>
      ${lease.problems.map((text) => html`<p class="problem" key=${text}>${plain(text, 400)}</p>`)}
    </section>
    ${lease.state === "queued" && html`<section class="sheet" aria-labelledby="why"><div class="head"><h2 id="why">Why it waits</h2></div><${Why} leaseId=${id} nameOf=${nameOf} /></section>`}
    ${lease.state === "active" && lease.preempt_at && html`<section class="sheet" aria-labelledby="why"><div class="head"><h2 id="why">Why it ends</h2></div><${Why} leaseId=${id} nameOf=${nameOf} /></section>`}
    ${lease.granted_at && html`<${HistoryPlots} path=${`v1/leases/${encodeURIComponent(id)}/metrics`} query=${query} label="" live=${lease.state === "active"} />`}
    <section class="sheet" aria-labelledby="events-title"><div class="head"><h2 id="events-title">Events</h2></div>
      <${Trouble} answer=${events} />
      <ol class="events">${(events.value?.items ?? []).map((event) => html`<${EventLine} key=${event.seq} event=${{ ...event, ...eventPlace(event, devices), holder: lease.holder, job: "" }} />`)}</ol>
    </section>`;
}
