// One GPU: who has it, its readings and their past, its processes, its health.

import { nowMs } from "../clock.js";
import { amount, gibibytes, percent, plain } from "../format.js";
import { html } from "../html.js";
import { eventPlace, gpuNames, modelOf, nodeViews, until } from "../model.js";
import { Action, may } from "../parts/action.js";
import { Trouble, useAnswer } from "../parts/answers.js";
import { Link, Since, State, User } from "../parts/marks.js";
import { HistoryPlots } from "../parts/history_plots.js";
import { EventLine } from "./events.js";
import { purpose } from "./now.js";

const EVENTS_MS = 10_000;

/** The whole view. */
export function GpuPage({ data, id, query }) {
  const nodes = nodeViews(data, "", nowMs());
  const gpu = nodes.flatMap((node) => node.gpus).find((one) => one.uuid === id);
  if (!gpu)
    return html`<section class="sheet"><div class="head"><h1 tabindex="-1">GPU</h1></div><p class="none">There is no GPU ${plain(id)}.</p></section>`;
  const node = nodes.find((one) => one.name === gpu.node);
  return html`
    <section class="sheet" aria-labelledby="title">
      <div class="head"><h1 id="title" tabindex="-1">GPU ${gpu.index} of ${plain(gpu.node)}</h1><${State} state=${gpu.stateKey} word=${gpu.word} />
        <span class="facts">${modelOf(gpu)}</span><${Actions} gpu=${gpu} node=${node} me=${data.me} /></div>
      <dl class="pairs">
        ${gpu.user && html`<${Pair} name="Held by"><${User} name=${gpu.user} /> ${plain(gpu.holder?.label ?? "", 60)}<//>`}
        ${gpu.lease && html`<${Pair} name="Lease"><${Link} view="leases" id=${gpu.lease.id} class="id">${gpu.lease.id}<//> <span class="quiet">${until(gpu.lease, nowMs())}</span><//>`}
        ${gpu.job && html`<${Pair} name="Job"><${Link} view="jobs" id=${gpu.job.id}>${purpose(gpu)}<//><//>`}
        ${gpu.reason && html`<${Pair} name="Why">${plain(gpu.reason, 400)}<//>`}
        <${Pair} name="Utilization">${percent(gpu.utilization_ratio)}${gpu.idleS > 60 ? html` <span class="quiet">no work for <${Since} at=${gpu.last_busy_at} /></span>` : null}<//>
        <${Pair} name="Memory">${gibibytes(gpu.memory_used_bytes)} / ${gibibytes(gpu.memory_total_bytes)} GiB<//>
        <${Pair} name="Temperature">${amount(gpu.temperature_c, "°C")}<//>
        <${Pair} name="Power">${amount(gpu.power_w, "W")}<//>
      </dl>
    </section>
    <${HistoryPlots} path=${`v1/gpus/${encodeURIComponent(id)}/history`} query=${query} label=${`GPU ${gpu.index}`} />
    <${Processes} gpu=${gpu} />
    <${Health} gpu=${gpu} node=${node} nameOf=${gpuNames(data)} />
    <${History} data=${data} id=${id} />`;
}

/** What the caller may do to a GPU and its node. */
function Actions({ gpu, node, me }) {
  const [gpuPath, nodePath] = [`v1/gpus/${encodeURIComponent(gpu.uuid)}`, `v1/nodes/${encodeURIComponent(gpu.node)}`];
  const name = `GPU ${gpu.index} of ${gpu.node}`;
  const leases = leasesOn(node);
  const goOn = leases.length ? `These leases go on: ${leases.join("; ")}.` : "None of its GPUs is leased.";
  const seesLess = leases.length
    ? `The daemon refuses this while there are leases on it: ${leases.join("; ")}.`
    : "None of its GPUs is leased.";
  const asked = { asksWhy: true, body: (reason) => (reason ? { reason } : {}) };
  return html`
    <${Action} verb="Uncordon" offered=${may(me, "uncordonGpu") && gpu.cordoned && node.mode === "active"} subject=${name} path=${`${gpuPath}/uncordon`} danger=${false} consequence="It can be granted again." />
    <${Action} verb="Cordon" offered=${may(me, "cordonGpu") && !gpu.cordoned} subject=${name} path=${`${gpuPath}/cordon`} consequence=${`It is not granted any more. ${gpu.lease ? `Lease ${gpu.lease.id} goes on.` : "No one holds it."}`} />
    <${Action} verb="Drain" offered=${may(me, "drainNode") && node.mode === "active"} subject=${`node ${gpu.node}`} path=${`${nodePath}/drain`} ...${asked} consequence=${`No GPU of it is granted any more. ${goOn}`} />
    <${Action} verb="Pause" offered=${may(me, "pauseNode") && node.mode !== "paused"} subject=${`node ${gpu.node}`} path=${`${nodePath}/pause`} ...${asked} consequence=${`It is drained, and its worker closes NVML, for a reset or a new driver. ${seesLess}`} />
    <${Action} verb="Resume" offered=${may(me, "resumeNode") && node.mode !== "active"} subject=${`node ${gpu.node}`} path=${`${nodePath}/resume`} danger=${false} consequence="Its GPUs can be granted again." />`;
}

/** The leases on a node, in a few words each. */
function leasesOn(node) {
  const words = ({ lease, user }) =>
    `${lease.id} of ${[user, plain(lease.holder.label, 30)].filter(Boolean).join(", ")}`;
  return [...new Set(node.everyGpu.filter((gpu) => gpu.lease).map(words))];
}

/** A name and what it is. */
export function Pair({ name, children }) {
  return html`<div><dt>${name}</dt><dd>${children}</dd></div>`;
}

function Processes({ gpu }) {
  return html`<section class="sheet" aria-labelledby="processes"><div class="head"><h2 id="processes">Processes</h2><span class="facts">${gpu.processes.length || ""}</span></div>
    ${gpu.processes.length === 0 && html`<p class="none">${gpu.hidden_use ? "Its processes are hidden from the worker." : "No process uses it."}</p>`}
    ${
      gpu.processes.length > 0 &&
      html`<table id="processes-table"><thead><tr><th scope="col">pid</th><th scope="col">User</th><th scope="col">Memory</th><th scope="col">Lease</th><th scope="col">Command</th></tr></thead>
      <tbody>${gpu.processes.map(
        (one) => html`<tr key=${one.pid}>
        <td data-label="pid" class="number">${one.pid}</td>
        <td data-label="User"><${User} name=${one.user ?? "?"} /></td>
        <td data-label="Memory" class="nowrap">${gibibytes(one.memory_bytes)} GiB</td>
        <td data-label="Lease">${one.lease_id ? html`<${Link} view="leases" id=${one.lease_id} class="id">${one.lease_id}<//>` : one.bystander ? "bystander" : html`<${State} state="foreign" word="none" />`}</td>
        <td data-label="Command"><code>${plain(one.command ?? "", 200)}</code></td>
      </tr>`,
      )}</tbody></table>`
    }
  </section>`;
}

function Health({ gpu, node, nameOf }) {
  const shown = (value) => (value === null || value === undefined ? "?" : String(value));
  const peers = (node?.links ?? [])
    .filter((link) => [link.first, link.second].includes(gpu.uuid))
    .map(
      (link) =>
        `${nameOf(link.first === gpu.uuid ? link.second : link.first)} (${plain(link.path.replaceAll("_", " "))})`,
    );
  return html`<section class="sheet" aria-labelledby="health"><div class="head"><h2 id="health">Health</h2></div><dl class="pairs">
    <${Pair} name="Health">${plain(gpu.health)}<//>
    ${gpu.warnings?.length > 0 && html`<${Pair} name="Warnings">${plain(gpu.warnings.join(", "), 300)}<//>`}
    <${Pair} name="Throttled by">${gpu.throttle_reasons === null || gpu.throttle_reasons === undefined ? "?" : plain(gpu.throttle_reasons.join(", ") || "nothing", 200)}<//>
    <${Pair} name="ECC errors">${shown(gpu.ecc_corrected)} corrected, ${shown(gpu.ecc_uncorrected)} uncorrected<//>
    <${Pair} name="Remapped rows">${shown(gpu.remapped_rows)}<//>
    <${Pair} name="Recovery">${plain(gpu.recovery_action ?? "?")}<//>
    <${Pair} name="Compute mode">${plain(gpu.compute_mode ?? "?").replaceAll("_", " ")}<//>
    <${Pair} name="PCI">${plain(gpu.pci_bus_id ?? "?")}<//>
    <${Pair} name="NUMA node">${shown(gpu.numa_node)}<//>
    ${peers.length > 0 && html`<${Pair} name="Links">${peers.join(", ")}<//>`}
    <${Pair} name="UUID"><code>${plain(gpu.uuid)}</code><//>
  </dl></section>`;
}

function History({ data, id }) {
  const answer = useAnswer(`v1/events?gpu=${encodeURIComponent(id)}&order=desc&limit=50`, EVENTS_MS);
  const devices = new Map(data.gpus.items.map((one) => [one.uuid, one]));
  return html`<section class="sheet" aria-labelledby="events-title"><div class="head"><h2 id="events-title">Events</h2></div>
    <${Trouble} answer=${answer} />
    ${answer.value?.items?.length === 0 && html`<p class="none">No events yet.</p>`}
    <ol class="events">${(answer.value?.items ?? []).map((event) => html`<${EventLine} key=${event.seq} ids=${true} event=${{ ...event, ...eventPlace(event, devices), holder: null, job: "" }} />`)}</ol>
  </section>`;
}
