// A bell at a request: when its GPUs are granted, one window of this browser says so, also while the page is hidden.

import { html, useState } from "../html.js";
import { places, plain } from "../format.js";
import { userOf } from "../model.js";
import { address } from "../route.js";
import { ofDevice } from "../storage.js";

const MOST = 50;
const TITLE = "gpulease: granted";
/** Of this daemon, which may share its host with others. */
const storeKey = () => `gpulease-bells ${new URL(".", document.baseURI).pathname}`;

/** The leases that have a bell in this browser. @returns {string[]} */
export function bells() {
  try {
    const kept = JSON.parse(ofDevice.getItem(storeKey()) ?? "[]");
    return Array.isArray(kept) ? kept.filter((id) => typeof id === "string").slice(-MOST) : [];
  } catch {
    return []; // something else wrote there
  }
}

function keep(ids) {
  if (ids.length) ofDevice.setItem(storeKey(), JSON.stringify(ids.slice(-MOST)));
  else ofDevice.removeItem(storeKey());
}

/** Why no notification can be shown here; "" if one can. */
function obstacle() {
  if (!globalThis.isSecureContext || !globalThis.Notification)
    return "This browser shows notifications only for pages from its own host or over TLS. The title of the tab will say it.";
  return Notification.permission === "denied"
    ? "This browser does not allow notifications of this page. The title of the tab will say it."
    : "";
}

/** The button: permission is asked for when it is pressed, and never otherwise. */
export function Bell({ leaseId }) {
  const [set, change] = useState(bells().includes(leaseId));
  const [said, say] = useState("");
  const press = async () => {
    keep(set ? bells().filter((id) => id !== leaseId) : [...bells(), leaseId]);
    change(!set);
    if (!set && !obstacle()) await Notification.requestPermission();
    say(set ? "" : obstacle());
  };
  return html`<button type="button" class="bell" aria-pressed=${set} onClick=${press} title=${said || "Notify me when it is granted"} aria-label="Notify me when it is granted">
    <svg viewBox="0 0 12 12" aria-hidden="true"><path d="M2 9c1-1 1-2 1-4a3 3 0 0 1 6 0c0 2 0 3 1 4zM5 10.5h2" /></svg></button>
    ${said && html`<span class="quiet" role="status">${said}</span>`}`;
}

const granted = new Set(); // for the title, until the reader comes

/** Ring for those leases with a bell that are active, and tell `rung`; forget those that are neither waiting nor active. @param {any} data @param {() => void} rung */
export function ring(data, rung) {
  const set = bells();
  if (!set.length) return;
  const active = new Map(data.active.items.map((lease) => [lease.id, lease]));
  const waiting = new Set(data.queued.items.map((lease) => lease.id));
  for (const id of set) {
    const lease = active.get(id);
    if (lease)
      claim(id, () => {
        announce(lease);
        rung();
      });
    else if (!waiting.has(id) && !data.queued.more && !data.active.more) claim(id, () => {});
  }
}

/** Take a bell away and do this, in only one of the windows. */
async function claim(id, does) {
  const take = () => {
    const set = bells();
    if (!set.includes(id)) return;
    keep(set.filter((one) => one !== id));
    does();
  };
  if (globalThis.navigator?.locks) await navigator.locks.request(storeKey(), take);
  else take();
}

function announce(lease) {
  granted.add(lease.id);
  if (obstacle() || Notification.permission !== "granted") return;
  const nodes = new Set(lease.gpus.map((gpu) => gpu.node));
  const what = plain(lease.holder.label, 60) || lease.id;
  const body = `${what} (${userOf(lease.holder)}): GPU ${places(lease.gpus, nodes.size > 0)}`;
  const shown = new Notification(TITLE, { body, tag: lease.id });
  shown.onclick = () => {
    focus();
    location.hash = address("leases", lease.id);
    shown.close();
  };
}

/** What the title of the tab begins with, until it is seen. */
export function titleMark() {
  if (document.hasFocus()) granted.clear();
  return granted.size ? "* granted · " : "";
}
