// One job: is it well, what its GPUs did, what it said, what it is.

import { nowMs } from "../clock.js";
import { duration, percent, plain, printed } from "../format.js";
import { html, useEffect, useMemo, useState } from "../html.js";
import { eventPlace, jobName, preemptedTimes } from "../model.js";
import { Action, may } from "../parts/action.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { diagnose } from "../parts/diagnosis.js";
import { metricsLine, zoomOf, zoomTo } from "../parts/history_plots.js";
import { Log } from "../parts/log.js";
import { Link, Moment, State, User } from "../parts/marks.js";
import { Plots } from "../parts/plots.js";
import { quoted } from "../parts/shell_words.js";
import { setQuery } from "../route.js";
import { EventLine } from "./events.js";
import { Pair } from "./gpu.js";
import { JobTime } from "./jobs.js";
import { gpuHours } from "./usage.js";

const JOB_MS = 2000;
const METRICS_MS = 4000;
const POINTS = 300;
const MOST_LETTERS = 2000; // of a command

/** The whole view. */
export function JobPage({ data, id, query }) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  const [over, setOver] = useState(false); // an ended job does not change
  const answer = useAnswer(path, over ? null : JOB_MS);
  const job = answer.value;
  useEffect(() => setOver(Boolean(job?.ended_at)), [job?.ended_at]);
  const metrics = useAnswer(job?.attempts ? `${path}/metrics?points=${POINTS}` : null, over ? null : METRICS_MS);
  const events = useAnswer(job && `v1/events?job=${encodeURIComponent(id)}&order=desc&limit=50`, over ? null : JOB_MS);
  if (!job) return html`<${Head} key="head" id=${id} answer=${answer} />`;
  return html`
    <${Trouble} answer=${answer} />
    <${Head} key="head" id=${id} answer=${answer} metrics=${metrics.value} data=${data} />
    <${Metrics} job=${job} metrics=${metrics} query=${query} />
    <${Log} job=${job} ranks=${ranksOf(job)} query=${query} />
    <div class="two">
      <section class="sheet" aria-labelledby="events-title"><div class="head"><h2 id="events-title">Events</h2></div>
        <${JobEvents} job=${job} events=${events} data=${data} /></section>
      <${Facts} job=${job} />
    </div>`;
}

/** How many ranks a job has; 0 where its launcher starts none. */
function ranksOf(job) {
  return job.launcher === "plain" ? 0 : job.gpus.length || (job.gpu_count ?? 0);
}

/** Its heading is there before the job: it may have the focus. */
function Head({ id, answer, metrics, data }) {
  const { value: job, problem, again } = answer;
  if (!job)
    return html`<section class="sheet job-head" aria-labelledby="title"><div class="head"><h1 id="title" tabindex="-1">Job <span class="id">${plain(id)}</span></h1></div>${problem ? html`<${Trouble} answer=${answer} />` : html`<p class="none">Loading...</p>`}</section>`;
  const several = data.nodes.items.length > 1;
  const nodes = [...new Set(job.gpus.map((gpu) => gpu.node))];
  const held = metrics?.gpu_hours_held;
  const unknown = held > 0 && metrics.gpu_hours_unknown >= held;
  const used = unknown ? null : metrics?.gpu_hours_used;
  return html`<section class="sheet job-head" aria-labelledby="title">
    <div class="head">
      <h1 id="title" tabindex="-1">${jobName(job)}</h1><${State} state=${job.state} /><span class="nowrap"><${JobTime} job=${job} /></span>
      <${User} name=${job.user} />
      ${job.gpus.length > 0 && html`<span>GPU ${job.gpus.map((gpu, at) => html`${at ? ", " : ""}<${Link} view="gpus" id=${gpu.uuid}>${gpu.index}<//>`)}${several || nodes.length > 1 ? ` of ${nodes.map((node) => plain(node)).join(", ")}` : ""}</span>`}
      ${held !== undefined && html`<span class="facts">${gpuHours(used)} of ${gpuHours(held)} GPU-hours used${held > 0 && !unknown ? ` (${percent(used / held)})` : ""}</span>`}
      ${
        may(data.me, "cancelJob", job.user) &&
        html`<${Action} verb="Cancel" offered=${job.ended_at === null} subject=${jobName(job)} path=${`v1/jobs/${encodeURIComponent(job.id)}/cancel`} onDone=${again}
        consequence=${`It is told to stop, and after 35 s all its processes are ended. ${job.gpus.length ? `Its ${job.gpus.length === 1 ? "GPU is" : `${job.gpus.length} GPUs are`} given back.` : "It leaves the queue."}`} />`
      }
    </div>
    <${Command} job=${job} />
    ${job.reason && html`<p class=${["failed", "lost", "timed_out"].includes(job.state) ? "problem" : "reason"}>${plain(job.reason, 500)}${job.exit_code === null ? "" : ` Exit code ${job.exit_code}.`}</p>`}
    ${job.traceback && html`<pre class="traceback" tabindex="0">${printed(job.traceback)}</pre>`}
  </section>`;
}

/** As many words of a command as are shown. Each is isolated: one from right to left would reverse the order of those after it. */
function beginning(words) {
  const shown = [];
  let room = MOST_LETTERS;
  for (const word of words) {
    shown.push(room > 0 ? plain(word, Math.max(room, 10)) : "...");
    if (room <= 0) break;
    room -= word.length + 1;
  }
  return shown;
}

function Command({ job }) {
  const [copied, setCopied] = useState(false);
  const words = [...(job.launcher === "plain" ? [] : [job.launcher]), ...job.command].map(quoted);
  const copy = async () => {
    await navigator.clipboard.writeText(words.join(" "));
    setCopied(true);
  };
  return html`<p class="command"><code>$${beginning(words).map((word) => html` <bdi>${word}</bdi>`)}</code>${globalThis.navigator?.clipboard && html`<button type="button" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`}</p>`;
}

function Metrics({ job, metrics, query }) {
  const attempts = metrics.value?.attempts ?? [];
  const number = attempts.some(({ attempt }) => String(attempt) === query.attempt)
    ? Number(query.attempt)
    : attempts.at(-1)?.attempt;
  const attempt = attempts.find((one) => one.attempt === number);
  const gpus = useMemo(() => (attempt ? labelled(attempt, job) : []), [attempt]);
  const lines = useMemo(() => gpus.map((gpu) => metricsLine(gpu, gpu.label)), [gpus]);
  const findings = useMemo(() => diagnose(gpus), [gpus]);
  const statistic = query.show === "max" ? "max" : "mean";
  if (metrics.problem && !metrics.value)
    return html`<section class="sheet"><div class="head"><h2>Metrics</h2></div><${Trouble} answer=${metrics} /></section>`;
  if (!attempt) return null;
  return html`<section class="sheet" aria-labelledby="metrics-title"><div class="head"><h2 id="metrics-title">Metrics</h2>
      ${attempts.length > 1 && html`<div class="choice" role="group" aria-label="Attempt">${attempts.map((one) => html`<button type="button" key=${one.attempt} aria-pressed=${one.attempt === number} onClick=${() => setQuery({ attempt: one.attempt, from: "", to: "" })}>attempt ${one.attempt}</button>`)}</div>`}
      <div class="choice" role="group" aria-label="Statistic of a bucket">${["mean", "max"].map((name) => html`<button type="button" key=${name} aria-pressed=${name === statistic} onClick=${() => setQuery({ show: name === "mean" ? "" : name })}>${name}</button>`)}</div>
      <span class="facts">one cursor through all four; drag to zoom, double-click to go back</span></div>
    <${Trouble} answer=${metrics} />
    <ul class="findings">${findings.map((one) => html`<li key=${one.kind + one.label} class=${one.kind}><${State} state="conflict" word="" />${one.text}</li>`)}</ul>
    <${Plots} lines=${lines} statistic=${statistic} zoom=${zoomOf(query)} onZoom=${zoomTo} group=${`${job.id}/${number}`} />
  </section>`;
}

/** The GPUs of an attempt by rank, with what each is called. */
function labelled(attempt, job) {
  const order = new Map(job.gpus.map((gpu, rank) => [gpu.uuid, rank]));
  const nodes = new Set(attempt.gpus.map((gpu) => gpu.node));
  const place = (gpu) => `GPU ${gpu.index}${nodes.size > 1 ? ` of ${plain(gpu.node)}` : ""}`;
  return attempt.gpus
    .map((gpu, at) => ({ ...gpu, rank: order.get(gpu.uuid) ?? at }))
    .sort((one, other) => one.rank - other.rank)
    .map((gpu) => ({ ...gpu, label: ranksOf(job) ? `rank ${gpu.rank}, ${place(gpu)}` : place(gpu) }));
}

function JobEvents({ job, events, data }) {
  const devices = new Map(data.gpus.items.map((gpu) => [gpu.uuid, gpu]));
  return html`<${Trouble} answer=${events} /><ol class="events">${(events.value?.items ?? []).map((event) => html`<${EventLine} key=${event.seq} event=${{ ...event, ...eventPlace(event, devices), holder: null, job: "", job_id: null, lease_id: event.lease_id === job.lease_id ? null : event.lease_id }} ids=${true} />`)}</ol>`;
}

function timeLeft(job) {
  if (!job.started_at || job.ended_at) return "";
  if (job.attempt_history.at(-1)?.regrouped) return " for all attempts under its lease";
  return `, ${duration((Date.parse(job.started_at) - nowMs()) / 1000 + job.timeout_s)} left`;
}

function Facts({ job }) {
  return html`<section class="sheet" aria-labelledby="facts-title"><div class="head"><h2 id="facts-title">Job</h2></div><dl class="pairs">
    <${Pair} name="Id"><code>${job.id}</code><//>
    <${Pair} name="Lease"><${Link} view="leases" id=${job.lease_id} class="id">${job.lease_id}<//><//>
    <${Pair} name="Launcher">${plain(job.launcher)}<//>
    ${job.working_directory && html`<${Pair} name="Directory"><code>${plain(job.working_directory, 300)}</code><//>`}
    <${Pair} name="Submitted"><${Moment} at=${job.created_at} /><//>
    <${Pair} name="Started">${job.started_at ? html`<${Moment} at=${job.started_at} /> <span class="quiet">after ${duration((Date.parse(job.started_at) - Date.parse(job.created_at)) / 1000)}</span>` : "-"}<//>
    ${job.ended_at && html`<${Pair} name="Ended"><${Moment} at=${job.ended_at} /><//>`}
    ${job.timeout_s && html`<${Pair} name="Time limit">${duration(job.timeout_s)}${timeLeft(job)}<//>`}
    ${job.priority !== "normal" && html`<${Pair} name="Priority">${plain(job.priority)}<//>`}
    ${job.preemptible && html`<${Pair} name="Preemptible">${job.preempted < 2 ? "it may end, after a notice, for the first request that waits; then it is queued again" : "no more, as it was preempted twice"}<//>`}
    <${Pair} name="Attempts">${job.attempts} of ${(job.retries ?? 0) + 1}<//>
    ${(job.preempt_at || job.preempted > 0) && html`<${Pair} name="Preempted">${job.preempt_at ? html`by <${Moment} at=${job.preempt_at} />, for a request that waits; then it is queued again` : `${preemptedTimes(job)}${job.state === "queued" ? ", and waits again at its old place" : ""}`}<//>`}
    ${job.attempt_history.map((one) => html`<${Pair} key=${one.number} name=${`Attempt ${one.number}`}>${plain(one.reason ?? "", 300)}${one.exit_code === null ? "" : ` Exit code ${one.exit_code}.`}<//>`)}
  </dl></section>`;
}
