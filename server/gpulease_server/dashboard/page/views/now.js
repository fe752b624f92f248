// Now: every GPU as a card, beside it who waits, and below what runs.

import { amount, askedFor, gibibytes, percent, plain } from "../format.js";
import { nowMs } from "../clock.js";
import { html, useState } from "../html.js";
import {
  eventViews,
  gpuNames,
  historyByGpu,
  hueOf,
  IDLE_ALARM_S,
  jobName,
  jobViews,
  modelOf,
  nodeViews,
  queueViews,
  totals,
  until,
  userOf,
} from "../model.js";
import { Bar, Link, More, Since, State, User } from "../parts/marks.js";
import { Sparkline } from "../parts/sparkline.js";
import { EventLine } from "./events.js";
import { JobTime } from "./jobs.js";
import { UsageToday } from "./usage.js";

const QUEUE_ROWS = 6;
const JOB_ROWS = 8;
const EVENT_ROWS = 7;
const MAX_GPUS = 512;
const FOLDED_NODES = 3;
const PHONE = "(max-width: 46rem)"; // as page.css has it

/** The whole view. */
export function Now({ data, q }) {
  return html`
    <h1 class="unseen" tabindex="-1">Now</h1>
    <${Totals} data=${data} />
    <div class="now">
      <div class="now-gpus"><${Nodes} data=${data} q=${q} /><${Running} data=${data} q=${q} /></div>
      <div class="now-side">
        <${Waiting} data=${data} q=${q} />
        <${UsageToday} />
        <${Recent} data=${data} q=${q} />
      </div>
    </div>`;
}

/** GPUs by state, requests that wait, jobs that run. */
export function Totals({ data }) {
  const running = data.working.items.filter((job) => job.state === "running").length;
  const atLeast = (list) => (list.more ? "+" : "");
  const count = data.gpus.items.length;
  return html`<ul id="totals" aria-label="Totals">
    ${totals(data, nowMs()).map(
      ({
        key,
        count: number,
      }) => html`<li key=${key} data-total=${key} class=${key === "free" && !number ? "none-free" : ""}>
      <b>${number}</b> <${State} state=${key} /></li>`,
    )}
    <li class="rest"><b>${count}</b> ${count === 1 ? "GPU" : "GPUs"}</li>
    <li class="rest"><b>${data.queued.items.length + atLeast(data.queued)}</b> queued</li>
    <li class="rest"><b>${running + atLeast(data.working)}</b> ${running === 1 ? "job running" : "jobs running"}</li>
  </ul>`;
}

function Nodes({ data, q }) {
  const nodes = nodeViews(data, q, nowMs());
  const history = historyByGpu(data);
  if (!nodes.length)
    return html`<section class="sheet"><p class="none">${q ? `No GPU matches “${plain(q)}”.` : "No GPUs are known. gpulease doctor says why."}</p></section>`;
  const folds = nodes.length >= FOLDED_NODES && !q && matchMedia(PHONE).matches;
  let room = MAX_GPUS;
  return nodes.map((node) => {
    const shown = node.gpus.slice(0, Math.max(0, room));
    room -= shown.length;
    return html`<${NodeSection} key=${node.name} node=${node} shown=${shown} history=${history} folds=${folds} />`;
  });
}

/** The GPUs of a node. On a phone with several nodes, only their states until they are wanted. */
function NodeSection({ node, shown, history, folds }) {
  const [open, setOpen] = useState(false);
  const cards = html`<div class=${`cards${history.size ? "" : " no-history"}`}>
    ${shown.map((gpu) => html`<${Card} key=${gpu.uuid} gpu=${gpu} values=${history.get(gpu.uuid)} mixed=${node.models.length > 1} />`)}
  </div>`;
  const states = html`<p class="folded">${shown.map((gpu) => html`<${Link} key=${gpu.uuid} view="gpus" id=${gpu.uuid} aria-label=${`GPU ${gpu.index} ${gpu.word} ${gpu.user}`} class=${gpu.user ? `hue-${hueOf(gpu.user)}` : ""}><${State} state=${gpu.stateKey} word="" />${gpu.index}<//>`)}</p>`;
  return html`<section class="sheet node" aria-label=${`GPUs of ${plain(node.name)}`}>
    <${NodeHead} node=${node}>${folds && html`<button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Fold" : "Unfold"}</button>`}<//>
    ${folds && !open ? states : cards}
    <${More} hidden=${node.gpus.length - shown.length} />
  </section>`;
}

/** What a node is, and what is wrong with it. */
export function NodeHead({ node, children }) {
  const marks = [node.state !== "ready" && node.state, node.mode !== "active" && node.mode].filter(Boolean);
  const facts = [
    ...node.models.map(({ name, count }) => `${count} × ${name}`),
    node.driver_version && `driver ${plain(node.driver_version)}`,
    node.simulated && "simulated",
  ].filter(Boolean);
  const reason = node.reason ?? node.mode_reason;
  return html`<div class="node-head">
    <h2>${plain(node.name)}</h2>
    ${marks.map((word) => html`<${State} key=${word} state=${word} />`)}
    <span class="facts">${facts.join(" · ")}</span>${children}
    ${reason && html`<p class="reason">${plain(reason, 300)}</p>`}
  </div>`;
}

/** What a GPU is used for: job, label, or why it is not free. */
export function purpose(gpu) {
  if (gpu.job) return jobName(gpu.job);
  if (gpu.stateKey === "conflict" || gpu.state !== "leased") {
    const label = gpu.state === "unknown" ? gpu.holder?.label : "";
    return [label && plain(label), gpu.reason && plain(gpu.reason, 200)].filter(Boolean).join(": ");
  }
  return plain(gpu.holder?.label ?? "") || (gpu.holder?.owner_pid ? `pid ${gpu.holder.owner_pid}` : "");
}

function Card({ gpu, values, mixed }) {
  const { memory_used_bytes: used, memory_total_bytes: total } = gpu;
  const share = used === null || !total ? null : used / total;
  const warnings = [
    ...(gpu.health === "ok" || gpu.state === "unknown" || gpu.reason?.includes(gpu.health) ? [] : [gpu.health]),
    ...(gpu.warnings ?? []),
    ...(gpu.cordoned && gpu.state !== "cordoned" ? ["cordoned"] : []),
  ];
  const colour = gpu.holder && gpu.user ? `hue-${hueOf(gpu.user)}` : "";
  return html`<article class=${`card is-${gpu.stateKey} ${colour}`} data-gpu=${gpu.index} data-uuid=${gpu.uuid}>
    <h3><${Link} view="gpus" id=${gpu.uuid} class="whole"><span class="unseen">GPU </span>${gpu.index}<//>${mixed && html`<span class="model">${modelOf(gpu)}</span>`}</h3>
    <${State} state=${gpu.stateKey} word=${gpu.word} />
    <p class="who">${gpu.user ? html`<${User} name=${gpu.user} />` : html`<span class="quiet">${gpu.state === "free" ? "" : "-"}</span>`}</p>
    <p class=${`use ${gpu.idleS >= IDLE_ALARM_S ? "low" : ""}`}>${percent(gpu.utilization_ratio)}</p>
    ${values ? html`<${Sparkline} values=${values} label=${`Utilization of GPU ${gpu.index}, last hour`} />` : html`<span class="spark"></span>`}
    <div class="work">
      <p class="what" title=${purpose(gpu)}>${warnings.length ? html`<span class="warnings">${plain(warnings.join(", "))}</span> ` : null}${purpose(gpu)}</p>
      <p class=${`until ${gpu.lease?.preempt_at || gpu.lease?.reclaim_at ? "ends-early" : ""}`}>${until(gpu.lease, nowMs(), true)}</p>
    </div>
    <p class="readings">
      <span class="memory">${gibibytes(used)} / ${gibibytes(total)} GiB</span>
      <span>${amount(gpu.temperature_c, "°C")}</span><span>${amount(gpu.power_w, "W")}</span>
    </p>
    <${Bar} ratio=${share} />
  </article>`;
}

function Waiting({ data, q }) {
  const views = queueViews(data, q);
  const nameOf = gpuNames(data);
  return html`<section class="sheet" aria-labelledby="waiting">
    <div class="head"><h2 id="waiting">Queue</h2><span class="facts">${views.length ? `${views.length} waiting` : ""}</span></div>
    ${views.length === 0 && html`<p class="none">${q && data.queued.items.length ? "No request in the queue matches." : "The queue is empty."}</p>`}
    ${
      views.length > 0 &&
      html`<table class="slim"><thead><tr><th scope="col">#</th><th scope="col">Who</th><th scope="col">Wants</th><th scope="col">Waiting</th></tr></thead>
      <tbody>${views.slice(0, QUEUE_ROWS).map(
        (lease) => html`<tr key=${lease.id}>
        <td class="number">${lease.position ?? "-"}</td>
        <td class="cut"><${Link} view="leases" id=${lease.id}><${User} name=${userOf(lease.holder) || "?"} /><//> <span class="quiet">${lease.job ? jobName(lease.job) : plain(lease.holder.label, 30)}</span></td>
        <td class="cut">${askedFor(lease.demand, nameOf)}</td>
        <td class="nowrap"><${Since} at=${lease.created_at} /></td>
      </tr>`,
      )}</tbody></table>`
    }
    ${views.length > QUEUE_ROWS && html`<p class="all"><${Link} view="queue" query=${{ q }}>All ${views.length}<//></p>`}
  </section>`;
}

function Running({ data, q }) {
  const views = jobViews(data, q).filter((job) => job.state !== "queued");
  const running = views.filter((job) => job.ended_at === null).length;
  const uses = new Map(data.gpus.items.map((gpu) => [gpu.uuid, gpu.utilization_ratio]));
  const nameOf = gpuNames(data);
  if (!views.length) return null;
  return html`<section class="sheet" aria-labelledby="running">
    <div class="head"><h2 id="running">Jobs</h2><span class="facts">${running} running, and the last that ended</span></div>
    <table><thead><tr><th scope="col">Job</th><th scope="col">User</th><th scope="col">State</th><th scope="col">GPUs</th><th scope="col">Time</th><th scope="col">Utilization now</th></tr></thead>
      <tbody>${views.slice(0, JOB_ROWS).map(
        (job) => html`<tr key=${job.id}>
        <td data-label="Job" class="cut"><${Link} view="jobs" id=${job.id}>${jobName(job)}<//></td>
        <td data-label="User"><${User} name=${job.user} /></td>
        <td data-label="State"><${State} state=${job.state} /></td>
        <td data-label="GPUs">${job.gpus.map((gpu) => nameOf(gpu.uuid)).join(", ") || "-"}</td>
        <td data-label="Time" class="nowrap"><${JobTime} job=${job} /></td>
        <td data-label="Utilization" class="gauge">${job.ended_at === null && html`<${MeanUse} job=${job} uses=${uses} />`}</td>
      </tr>`,
      )}</tbody></table>
    ${views.length > JOB_ROWS && html`<p class="all"><${Link} view="jobs" query=${{ q }}>All ${views.length}<//></p>`}
  </section>`;
}

/** The mean of a job's GPUs now, of those that are known. */
function MeanUse({ job, uses }) {
  const known = job.gpus.map((gpu) => uses.get(gpu.uuid) ?? null).filter((ratio) => ratio !== null);
  const mean = known.length ? known.reduce((sum, ratio) => sum + ratio, 0) / known.length : null;
  return html`${percent(mean)} <${Bar} ratio=${mean} />`;
}

function Recent({ data, q }) {
  const views = eventViews(data, q).slice(0, EVENT_ROWS);
  return html`<section class="sheet" aria-labelledby="recent">
    <div class="head"><h2 id="recent">Recent events</h2><${Link} view="events" query=${{ q }}>All<//></div>
    ${views.length === 0 && html`<p class="none">${q && data.events.length ? "No event matches." : "No events yet."}</p>`}
    <ol class="events slim">${views.map((event) => html`<${EventLine} key=${event.seq} event=${event} />`)}</ol>
  </section>`;
}
