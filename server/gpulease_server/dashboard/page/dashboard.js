// The page begins here: its data, and when they are drawn.

import { setToken, token } from "./api.js";
import { prepareDetails, showLog, showWhy } from "./details.js";
import { drawEvents } from "./events.js";
import { Follow, LISTS } from "./follow.js";
import { plain } from "./format.js";
import { drawNodes } from "./gpus.js";
import { drawJobs } from "./jobs.js";
import { cleared, current, lost, waiting } from "./notice.js";
import { drawQueue } from "./queue.js";
import { tick } from "./rows.js";
import { drawTotals } from "./totals.js";

const byId = (id) => document.getElementById(id);
const data = { events: [] };
let drawPending = false;

const nodes = { place: byId("nodes"), more: byId("nodes-more") };
const queue = { table: byId("queue"), none: byId("queue-none"), more: byId("queue-more") };
const jobs = { table: byId("jobs"), none: byId("jobs-none"), more: byId("jobs-more") };
const events = { list: byId("events"), none: byId("events-none") };

/** Index and node of a GPU, by UUID. */
function nameOf(uuid) {
  const gpu = data.gpus.items.find((one) => one.uuid === uuid);
  return gpu ? `GPU ${gpu.index} of ${plain(gpu.node)}` : uuid;
}

function draw() {
  drawPending = false;
  if (!LISTS.every((name) => name in data)) return; // the first round is under way
  drawTotals(byId("totals"), data);
  drawNodes(nodes, data);
  drawQueue(queue, data, (id) => showWhy(id, nameOf));
  drawJobs(jobs, data, showLog);
  drawEvents(events, data);
  document.body.dataset.drawn = "yes";
  byId("shown").hidden = false;
}

/** Remove all data: the new token may belong to another user. */
function clear() {
  data.events = [];
  if (document.body.dataset.drawn) {
    for (const name of LISTS) data[name] = { items: [], more: false };
    draw();
    byId("details-body").replaceChildren();
    byId("shown").hidden = true; // otherwise it would say that there are no GPUs
  }
  for (const name of LISTS) delete data[name];
  cleared();
}

/** Draw once for all data that arrived since the last frame. */
function drawSoon() {
  if (drawPending) return;
  drawPending = true;
  requestAnimationFrame(draw);
}

const follow = new Follow(data, {
  drawn: drawSoon,
  current(standby, asOfMs) {
    current(standby, asOfMs);
    byId("sign-in").hidden = true;
    byId("forget").hidden = !token();
  },
  failed: lost,
  refused(problem) {
    waiting();
    byId("sign-in-problem").textContent = token() ? problem.message : "";
    byId("sign-in").hidden = false;
    byId("token").focus();
  },
});

byId("sign-in").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  follow.stop(); // no answer to the former token may arrive any more
  setToken(byId("token").value.trim());
  byId("token").value = "";
  clear();
  follow.restart();
});

byId("forget").addEventListener("click", () => {
  setToken("");
  location.reload();
});

function look() {
  if (document.hidden) return;
  tick();
  follow.look();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) follow.stop();
  else follow.start();
  look();
});
addEventListener("online", () => follow.hurry());

prepareDetails();
setInterval(look, 1000);
if (!document.hidden) follow.start();
