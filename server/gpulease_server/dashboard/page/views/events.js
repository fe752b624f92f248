// Recent events, newest first. Names first, ids as links.

import { plain } from "../format.js";
import { html } from "../html.js";
import { eventViews, userOf } from "../model.js";
import { Link, Moment, User } from "../parts/marks.js";

/** The whole view. */
export function Events({ data, q }) {
  const views = eventViews(data, q);
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Events</h1><span class="facts">the last ${data.events.length}</span></div>
    ${views.length === 0 && html`<p class="none">${q ? "No event matches." : "No events yet."}</p>`}
    <ol id="events" class="events">${views.map((event) => html`<${EventLine} key=${event.seq} event=${event} ids=${true} />`)}</ol>
  </section>`;
}

/** One event: when, what, of whom, where and why. */
export function EventLine({ event, ids = false }) {
  const [noun, ...verb] = event.kind.split(".");
  const subject = event.job || (event.holder && plain(event.holder.label, 30)) || "";
  const target = event.job_id
    ? { view: "jobs", id: event.job_id }
    : event.lease_id
      ? { view: "leases", id: event.lease_id }
      : null;
  return html`<li class=${event.problem ? "is-problem" : ""}>
    <${Moment} at=${event.at} />
    <span class="event-text">
      ${event.problem && html`<svg class="alarm" viewBox="0 0 12 12" role="img" aria-label="Problem"><path d="M6 .8l5.6 10.4H.4z" /></svg>`}
      <span class="kind">${plain(`${noun} ${verb.join(" ")}`.replaceAll("_", " "))}</span>
      ${event.holder && html` <${User} name=${userOf(event.holder)} />`}
      ${target && (subject || ids) && html` <${Link} ...${target} class=${subject ? "" : "id"}>${subject || target.id}<//>`}
      ${event.where && html` <span class="quiet">on ${event.where}</span>`}
      ${event.reason ? html`<span class="quiet">: ${plain(event.reason, 300)}</span>` : null}
      ${ids && target && subject && html` <span class="id">${target.id}</span>`}
    </span>
  </li>`;
}
