// What is reserved: which GPUs, for whom, from when to when; administrators cancel it.

import { nowMs } from "../clock.js";
import { duration, places, plain } from "../format.js";
import { html } from "../html.js";
import { matches } from "../model.js";
import { Action, may } from "./action.js";
import { Trouble, useAnswer } from "./answers.js";
import { Moment, More, User } from "./marks.js";

const EVERY_MS = 10_000;
const MAX_ROWS = 50;

/** All reservations that have not ended, the first to begin first; nothing where there are none. */
export function ReservationsSection({ data, q }) {
  const answer = useAnswer("v1/reservations", EVERY_MS);
  const { value, problem, again } = answer;
  if (problem?.status === 404 || (!problem && !value?.items.length)) return null;
  const several = data.nodes.items.length > 1;
  const rows = (value?.items ?? []).filter((one) =>
    matches(q, [one.id, one.user, one.group, one.reason, ...one.gpus.flatMap(({ node, uuid }) => [node, uuid])]),
  );
  return html`<section class="sheet" aria-labelledby="reservations-title">
    <div class="head"><h2 id="reservations-title">Reservations</h2>
      <span class="facts">others get these GPUs only for a time that ends before the window</span></div>
    <${Trouble} answer=${answer} />
    ${value && rows.length === 0 && html`<p class="none">No reservation matches.</p>`}
    ${
      rows.length > 0 &&
      html`<table id="reservations"><thead><tr><th scope="col">For</th><th scope="col">GPUs</th><th scope="col">From</th><th scope="col">To</th><th scope="col">Reason</th><th scope="col"><span class="unseen">Changes</span></th></tr></thead>
      <tbody>${rows.slice(0, MAX_ROWS).map((one) => html`<${Row} key=${one.id} reservation=${one} several=${several} me=${data.me} onDone=${again} />`)}</tbody></table><${More} hidden=${rows.length - MAX_ROWS} />`
    }
  </section>`;
}

function Row({ reservation, several, me, onDone }) {
  const { id, user, group, gpus, from_at: from, to_at: to, reason } = reservation;
  const inS = (Date.parse(from) - nowMs()) / 1000;
  const whom = group ? `group ${plain(group)}` : plain(user ?? "?");
  return html`<tr>
    <td data-label="For" class="whom">${group ? html`group <b>${plain(group)}</b>` : html`<${User} name=${user ?? "?"} />`}</td>
    <td data-label="GPUs">${plain(places(gpus, several), 160)}</td>
    <td data-label="From"><span><${Moment} at=${from} /> <span class="quiet nowrap">${inS > 0 ? `in ${duration(inS)}` : "now"}</span></span></td>
    <td data-label="To" class="nowrap"><${Moment} at=${to} /></td>
    <td data-label="Reason">${plain(reason ?? "-", 120)}</td>
    <td class="action"><${Action} verb="Cancel" offered=${may(me, "cancelReservation")} subject=${`the reservation for ${whom}`} method="DELETE" path=${`v1/reservations/${encodeURIComponent(id)}`} onDone=${onDone}
      consequence="Others may then get these GPUs. No lease ends." /></td>
  </tr>`;
}
