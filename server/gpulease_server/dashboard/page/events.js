// Recent events, one line each.

import { moment } from "./clock.js";
import { places, plain, who } from "./format.js";
import { element, keep } from "./rows.js";

/** Draw the events into a list, newest first. */
export function drawEvents(place, data) {
  const devices = new Map(data.gpus.items.map((gpu) => [gpu.uuid, gpu]));
  const holders = new Map();
  for (const lease of [...data.ended.items, ...data.queued.items, ...data.active.items]) {
    holders.set(lease.id, who(lease.holder));
  }
  const views = data.events.map((event) => ({
    ...event, where: where(event, devices), who: holders.get(event.lease_id) ?? "",
  }));
  place.none.hidden = views.length > 0;
  keep(place.list, views, (event) => event.seq, make, draw);
}

function where(event, devices) {
  const known = event.gpus.map((uuid) => devices.get(uuid)).filter(Boolean);
  if (known.length) return `GPU ${places(known, true)}`;
  return event.node ? `node ${plain(event.node)}` : "";
}

function make() {
  return { node: element("li") };
}

function draw({ node }, event) {
  const [noun, ...verb] = event.kind.split(".");
  node.replaceChildren(
    element("time", { datetime: event.at, title: event.at, text: moment(Date.parse(event.at)) }),
    " ",
    element("span", { class: `kind kind-${noun}`, text: plain(`${noun} ${verb.join(" ")}`.replaceAll("_", " ")) }),
    " ",
    element("span", { class: "id", text: event.job_id ?? event.lease_id ?? "" }),
    [event.who && ` of ${event.who}`, event.where && ` on ${event.where}`].filter(Boolean).join(","),
    event.reason ? `: ${plain(event.reason, 300)}` : "",
  );
}
