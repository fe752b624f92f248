// Events, newest first: the last ones as they happen, or those around a time. Names first, ids as links.

import { nowMs } from "../clock.js";
import { plain } from "../format.js";
import { html, useMemo } from "../html.js";
import { eventViews, groupedByCause, userOf } from "../model.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { Link, Moment, User } from "../parts/marks.js";
import { setQuery } from "../route.js";

const AROUND_MS = 1_800_000;
const END_MS = Date.UTC(9999); // later ones have no form that the daemon reads
const MOST = 1000;
const KINDS = ["all", "problems", "lease", "job", "gpu", "node"];

/** The whole view. `at` in the address is a time: 2026-11-26T02:00Z, so that it is the same one in every zone, or as it is typed. */
export function Events({ data, q, query }) {
  const atMs = useMemo(() => momentOf(query.at ?? "", nowMs()), [query.at]); // 03:00 is not another one tomorrow
  const path =
    atMs === null
      ? null
      : `v1/events?from=${iso(atMs - AROUND_MS)}&to=${iso(atMs + AROUND_MS)}&order=desc&limit=${MOST}`;
  const answer = useAnswer(path);
  const { value, problem } = answer;
  const events = path === null ? data.events : (value?.items ?? []);
  const views = groupedByCause(eventViews({ ...data, events }, q).filter((event) => isOf(query.kind, event)));
  const gap = value?.pruned_seq > 0 && value.items.length === 0;
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Events</h1>
      <div class="choice" role="group" aria-label="Kind">${KINDS.map((kind) => html`<button type="button" key=${kind} aria-pressed=${kind === (query.kind ?? "all")} onClick=${() => setQuery({ kind: kind === "all" ? "" : kind })}>${kind}</button>`)}</div>
      <form class="at" onSubmit=${jump}><label>around <input name="at" type="text" size="16" key=${query.at ?? ""} defaultValue=${atMs === null ? (query.at ?? "") : dated(atMs)} placeholder="03:00" autocomplete="off" /></label><button type="submit">Go</button>
        ${query.at && html`<button type="button" onClick=${() => setQuery({ at: "" })}>Now</button>`}</form>
      <span class="facts">${atMs === null ? `the last ${data.events.length}` : `half an hour before and after, ${value?.next ? `only the last ${MOST} events` : `${views.length} of them`}`}</span></div>
    ${query.at && atMs === null && html`<p class="problem">“${plain(query.at)}” is no time: write 03:00, or 2026-11-26 03:00.</p>`}
    <${Trouble} answer=${answer} />
    ${gap && html`<p class="problem">Older events are no longer kept: there may have been some at that time.</p>`}
    ${path !== null && !value && !problem && html`<p class="none">Loading...</p>`}
    ${views.length === 0 && !problem && (path === null || value) && html`<p class="none">${q || query.kind || query.at ? "No event matches." : "No events yet."}</p>`}
    <ol id="events" class="events">${views.map((event) => html`<${EventLine} key=${event.seq} event=${event} ids=${true} />`)}</ol>
  </section>`;
}

function jump(event) {
  event.preventDefault();
  const text = new FormData(event.target).get("at")?.toString().trim() ?? "";
  const atMs = momentOf(text, nowMs());
  setQuery({ at: atMs === null ? text : new Date(atMs).toISOString().replace(":00.000", "") });
}

/** A time with its day, as it is typed. */
function dated(atMs) {
  return new Date(atMs).toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
}

function iso(atMs) {
  return new Date(atMs).toISOString().replace(".000", "");
}

/** The time that a text names, in this browser's zone where it has none; without a day the last one, not in the future. Null if it names none. */
export function momentOf(text, beforeMs) {
  const [, day = "", hours, minutes, zone] = /^(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d?):(\d\d)(Z?)$/.exec(text.trim()) ?? [];
  if (hours === undefined || Number(hours) > 23 || Number(minutes) > 59) return null;
  const time = `${hours.padStart(2, "0")}:${minutes}`;
  if (day) {
    const atMs = new Date(`${day}T${time}${zone}`).getTime();
    const isDay = new Date(`${day}T00:00Z`).toJSON()?.startsWith(day); // 30 February would be 2 March
    return isDay && atMs >= 0 && atMs < END_MS ? atMs : null;
  }
  const today = new Date(beforeMs);
  today.setHours(Number(hours), Number(minutes), 0, 0);
  if (today.getTime() > beforeMs) today.setDate(today.getDate() - 1);
  return today.getTime();
}

function isOf(kind, event) {
  if (!kind || kind === "all") return true;
  return kind === "problems" ? event.problem : event.kind.startsWith(`${kind}.`);
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
  return html`<li class=${[event.problem && "is-problem", event.follows && "follows"].filter(Boolean).join(" ")}>
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
