// Wall: every GPU as a tile that is read from across the room, without a pointer and without scrolling.

import { moment, nowMs, realMs, wallTime } from "../clock.js";
import { percent, plain } from "../format.js";
import { html } from "../html.js";
import { historyByGpu, hueOf, nodeViews, queueViews, totals, userOf } from "../model.js";
import { Link, State, User } from "../parts/marks.js";
import { Sparkline } from "../parts/sparkline.js";
import { purpose } from "./now.js";

const NEXT = 3;
const NODE_LETTERS = 12;
const OLD_MS = 10_000;

/** The whole view. */
export function Wall({ data, q, asOfMs }) {
  const nodes = nodeViews(data, q, nowMs());
  const gpus = nodes.flatMap((node) => node.gpus);
  const history = historyByGpu(data);
  const columns = columnsFor(gpus.length, nodes);
  const ageMs = realMs() - asOfMs; // nowMs() stands still while the daemon does not answer
  return html`<div class="wall">
    <h1 class="unseen" tabindex="-1">Wall</h1>
    <div class="wall-head">
      <ul id="totals" aria-label="Totals">${totals(data, nowMs()).map(({ key, count }) => html`<li key=${key} data-total=${key}><b>${count}</b> <${State} state=${key} big=${true} /></li>`)}</ul>
      <${Next} data=${data} />
      <time class="wall-clock">${wallTime(realMs())}</time>
      <${Link} view="now" class="leave">Leave the wall<//>
    </div>
    ${ageMs > OLD_MS && html`<p class="wall-old">Data from ${moment(asOfMs)}</p>`}
    <div class=${`tiles columns-${columns}`}>
      ${gpus.map((gpu) => html`<${Tile} key=${gpu.uuid} gpu=${gpu} values=${history.get(gpu.uuid)} several=${nodes.length > 1} />`)}
    </div>
  </div>`;
}

/** As many columns as a node has GPUs, where that is possible: then a row is a node. */
function columnsFor(count, nodes) {
  const widest = Math.max(1, ...nodes.map((node) => node.gpus.length));
  if (nodes.length > 1 && widest <= 8 && widest >= 4) return widest;
  return count <= 4 ? 2 : count <= 16 ? 4 : 8;
}

/** The end of a node's name, without its domain: nodes differ there. */
function shortNode(name) {
  const host = [...plain(/^[^.]*[a-z][^.]*/i.exec(name)?.[0] ?? name, 255)];
  return host.length > NODE_LETTERS ? `…${host.slice(1 - NODE_LETTERS).join("")}` : host.join("");
}

/** Who is next in the queue. */
function Next({ data }) {
  const views = queueViews(data, "");
  return html`<p class="wall-queue"><b>${views.length}${data.queued.more ? "+" : ""}</b> queued${views.length ? ":" : ""}
    ${views.slice(0, NEXT).map((lease) => html` <${User} key=${lease.id} name=${userOf(lease.holder) || "?"} />`)}</p>`;
}

function Tile({ gpu, values, several }) {
  return html`<article class=${`tile is-${gpu.stateKey} ${gpu.user ? `hue-${hueOf(gpu.user)}` : ""}`} data-gpu=${gpu.index}>
    <h2><${Link} view="gpus" id=${gpu.uuid} class="whole"><span>${gpu.index}</span>${several && html`<small>${shortNode(gpu.node)}</small>`}<//></h2>
    <${State} state=${gpu.stateKey} word=${gpu.word} />
    <p class="who">${gpu.user ? plain(gpu.user) : ""}</p>
    <p class="use">${gpu.state === "free" ? "" : percent(gpu.utilization_ratio)}</p>
    ${values ? html`<${Sparkline} values=${values} label=${`Utilization of GPU ${gpu.index}, last hour`} />` : html`<p class="what">${purpose(gpu)}</p>`}
  </article>`;
}
