// The page begins here: what was seen last, who draws it, and when.

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
const seen = { events: [] };
let drawWaits = false;

const nodes = { place: byId("nodes"), more: byId("nodes-more") };
const queue = { table: byId("queue"), none: byId("queue-none"), more: byId("queue-more") };
const jobs = { table: byId("jobs"), none: byId("jobs-none"), more: byId("jobs-more") };
const events = { list: byId("events"), none: byId("events-none") };

/** Which GPU a UUID is, in words. */
function nameOf(uuid) {
  const gpu = seen.gpus.items.find((one) => one.uuid === uuid);
  return gpu ? `GPU ${gpu.index} of ${plain(gpu.node)}` : uuid;
}

function draw() {
  drawWaits = false;
  if (!LISTS.every((name) => name in seen)) return; // the first round is under way
  drawTotals(byId("totals"), seen);
  drawNodes(nodes, seen);
  drawQueue(queue, seen, (id) => showWhy(id, nameOf));
  drawJobs(jobs, seen, showLog);
  drawEvents(events, seen);
  document.body.dataset.drawn = "yes";
  byId("shown").hidden = false;
}

/** Show nothing more of what was seen: who looks now may be somebody else. */
function clear() {
  seen.events = [];
  if (document.body.dataset.drawn) {
    for (const name of LISTS) seen[name] = { items: [], more: false };
    draw();
    byId("details-body").replaceChildren();
    byId("shown").hidden = true; // it would say that there is nothing
  }
  for (const name of LISTS) delete seen[name];
  cleared();
}

/** Draw once for all that came since the last picture. */
function drawSoon() {
  if (drawWaits) return;
  drawWaits = true;
  requestAnimationFrame(draw);
}

const follow = new Follow(seen, {
  drawn: drawSoon,
  current(standby, asOfMs) {
    current(standby, asOfMs);
    byId("sign-in").hidden = true;
    byId("forget").hidden = !token();
  },
  failed: lost,
  refused(problem) {
    waiting();
    byId("sign-in-problem").textContent = token() ? problem.sentence : "";
    byId("sign-in").hidden = false;
    byId("token").focus();
  },
});

byId("sign-in").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  follow.stop(); // no answer to the former token may come any more
  setToken(byId("token").value.trim());
  byId("token").value = "";
  clear();
  follow.anew();
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
