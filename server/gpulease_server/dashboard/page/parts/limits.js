// The limits of users, groups and tokens, with what is used of each; administrators set and remove them.

import { asProblem, send } from "../api.js";
import { duration, plain } from "../format.js";
import { html, useRef, useState } from "../html.js";
import { matches } from "../model.js";
import { Action, may, newKey, said } from "./action.js";
import { Trouble, useAnswer } from "./answers.js";
import { Dialog } from "./dialog.js";
import { Bar, Link, More, User } from "./marks.js";
import { seconds } from "./shell_words.js";

const EVERY_MS = 10_000;
const MAX_ROWS = 200;
const WEEK_S = 604_800;
const KINDS = ["user", "group", "token"];
/** What a form asks for, with the field of the API. */
const COUNTS = { gpus: "max_gpus", leases: "max_leases", queue: "max_queued" };
const EMPTY = { kind: "user", name: "", gpus: "", leases: "", queue: "", time: "", hours: "", window: "", members: "" };

/** All limits that the caller may see; nothing where the daemon has none. */
export function LimitsSection({ me, q }) {
  const [edited, setEdited] = useState(/** @type {any} */ (null));
  const answer = useAnswer("v1/limits", EVERY_MS);
  const { value, problem, again } = answer;
  const sets = may(me, "replaceLimits");
  if (problem?.status === 404 || (!value && !problem)) return null;
  const rows = (value?.items ?? []).filter((one) => matches(q, [one.name, ...(one.members ?? [])]));
  const isShown = sets || rows.length > 0 || problem;
  return (
    isShown &&
    html`<section class="sheet" aria-labelledby="limits-title">
    <div class="head"><h2 id="limits-title">Limits</h2>${sets && html`<button type="button" onClick=${() => setEdited(EMPTY)}>Set limits…</button>`}
      <span class="facts">what is held or waits, of what may be</span></div>
    <${Trouble} answer=${answer} />
    ${value && rows.length === 0 && html`<p class="none">${q ? "Nothing matches." : "No limits are set."}</p>`}
    ${
      rows.length > 0 &&
      html`<table id="limits"><thead><tr><th scope="col">Of</th><th scope="col">GPUs</th><th scope="col">Leases</th><th scope="col">Queue</th><th scope="col">GPU-hours</th><th scope="col">Longest</th>${sets && html`<th scope="col"><span class="unseen">Changes</span></th>`}</tr></thead>
      <tbody>${rows.slice(0, MAX_ROWS).map((one) => html`<${Row} key=${`${one.kind} ${one.name}`} limit=${one} me=${me} sets=${sets} onEdit=${() => setEdited(formOf(one))} onDone=${again} />`)}</tbody></table><${More} hidden=${rows.length - MAX_ROWS} />`
    }
    ${edited && html`<${LimitsForm} given=${edited} onClose=${() => setEdited(null)} onDone=${again} />`}
  </section>`
  );
}

function Row({ limit, me, sets, onEdit, onDone }) {
  const { kind, name, members = [] } = limit;
  return html`<tr>
    <td data-label="Of">${kind === "user" ? html`<${Link} view="now" query=${{ q: name }}><${User} name=${name} /><//>` : html`${kind} <b>${plain(name)}</b>`}
      ${members.length > 0 && html` <span class="quiet">${plain(members.join(", "), 120)}</span>`}</td>
    <${Part} name="GPUs" used=${limit.gpus} most=${limit.max_gpus} />
    <${Part} name="Leases" used=${limit.leases} most=${limit.max_leases} />
    <${Part} name="Queue" used=${limit.queued} most=${limit.defaults?.includes("max_queued") ? null : limit.max_queued} />
    <${Part} name="GPU-hours" used=${limit.gpu_hours_used} most=${limit.gpu_hours} digits=${1} more=${` in ${spanText(limit.window_s)}`} />
    <td data-label="Longest">${limit.max_lease_s ? duration(limit.max_lease_s) : "-"}</td>
    ${
      sets &&
      html`<td class="action"><button type="button" class="act" aria-label=${`Change the limits of ${kind} ${name}`} onClick=${onEdit}>Change…</button>
      <${Action} verb="Remove" offered=${may(me, "deleteLimits") && limit.set_at !== null} subject=${`the limits of ${kind} ${name}`} method="DELETE" path=${pathOf(kind, name)} onDone=${onDone}
        consequence=${`No lease ends. ${kind === "user" ? "The defaults of the configuration hold for them then." : "Requests that wait for them may be granted."}`} /></td>`
    }
  </tr>`;
}

/** How much of one limit is used, in numbers and as a bar; without a limit only how much is. */
function Part({ name, used, most, digits = 0, more = "" }) {
  const finest = digits && most ? Math.max(digits, 1 - Math.floor(Math.log10(Math.max(used, most)))) : digits;
  const number = (value) => value.toFixed(Number.isInteger(value) ? 0 : Math.min(finest, 9));
  const known = used !== null && used !== undefined;
  if (most === null || most === undefined)
    return html`<td data-label=${name}>${known ? html`<span class="quiet">${number(used)}</span>` : "-"}</td>`;
  const ratio = known ? used / most : null;
  return html`<td data-label=${name} class="part"><span class="nowrap">${known ? number(used) : "?"} of ${most}${more}</span><${Bar} ratio=${ratio} tone=${ratio !== null && ratio >= 1 ? "full" : ""} /></td>`;
}

function pathOf(kind, name) {
  return `v1/limits/${kind}/${encodeURIComponent(name)}`;
}

/** A length of time as a form takes it. @param {number} lengthS */
export function spanText(lengthS) {
  for (const [unit, unitS] of Object.entries({ d: 86_400, h: 3600, m: 60 }))
    if (lengthS % unitS === 0) return lengthS / unitS + unit;
  return `${lengthS}s`;
}

/** A limit in the words of the form; what is the configuration's is left out, or it would be set for this user. */
export function formOf(limit) {
  const own = (field) =>
    limit.defaults?.includes(field) || limit[field] === null || limit[field] === undefined ? "" : limit[field];
  const [time, hours] = [own("max_lease_s"), own("gpu_hours")];
  return {
    kind: limit.kind,
    name: limit.name,
    ...Object.fromEntries(Object.entries(COUNTS).map(([name, field]) => [name, String(own(field))])),
    time: time === "" ? "" : spanText(time),
    hours: String(hours),
    window: hours === "" ? "" : spanText(limit.window_s),
    members: (limit.members ?? []).join(" "),
  };
}

/** The body that a form asks for, or what is wrong with it. @returns {{ body?: any, wrong?: string }} */
export function limitsOf(form) {
  const body = {};
  if (!form.name.trim()) return { wrong: "" };
  for (const [name, field] of Object.entries(COUNTS)) {
    if (form[name] && !/^[1-9]\d*$/.test(form[name]))
      return { wrong: "A number of GPUs, leases or requests is from 1." };
    if (form[name]) body[field] = Number(form[name]);
  }
  if (form.time && seconds(form.time) === null) return { wrong: "The longest time is like 30m, 24h or 7d." };
  if (form.time) body.max_lease_s = seconds(form.time);
  if (form.hours && !(Number(form.hours) > 0)) return { wrong: "GPU-hours are a number over 0." };
  if (form.window && seconds(form.window) === null) return { wrong: "The window is like 24h or 7d." };
  if (form.hours) Object.assign(body, { gpu_hours: Number(form.hours), window_s: seconds(form.window) ?? WEEK_S });
  if (form.kind === "group") body.members = form.members.split(/[\s,]+/).filter(Boolean);
  if (!Object.keys(body).some((field) => field !== "members" && field !== "window_s"))
    return { wrong: "Set at least one limit." };
  return { body };
}

function LimitsForm({ given, onClose, onDone }) {
  const [form, setForm] = useState(given);
  const [problem, setProblem] = useState(/** @type {any} */ (null));
  const sending = useRef(false);
  const isNew = given.name === "";
  const { body, wrong } = limitsOf(form);
  const change = (name) => (event) => setForm({ ...form, [name]: event.target.value });
  const submit = async (event) => {
    event.preventDefault();
    if (sending.current || !body) return;
    sending.current = true;
    try {
      await send("PUT", pathOf(form.kind, form.name.trim()), body, newKey());
      onDone();
      onClose();
    } catch (error) {
      setProblem(asProblem(error));
    } finally {
      sending.current = false;
    }
  };
  const text = (name, title, more = {}) =>
    html`<label>${title} <input type="text" name=${name} value=${form[name]} onInput=${change(name)} autocomplete="off" spellcheck=${false} ...${more} /></label>`;
  const number = { inputmode: "numeric", size: 5, placeholder: "none" };
  return html`<${Dialog} title=${isNew ? "Set limits" : `Change the limits of ${form.kind} ${plain(form.name)}`} onClose=${onClose} closes=${false}>
    <form class="submit" onSubmit=${submit}>
      ${
        isNew &&
        html`<div class="submit-row"><label>Of a <select name="kind" value=${form.kind} onChange=${change("kind")}>${KINDS.map((kind) => html`<option key=${kind}>${kind}</option>`)}</select></label>
        ${text("name", form.kind === "token" ? "Id" : "Name", { required: true, autofocus: true })}</div>`
      }
      <div class="submit-row">${text("gpus", "GPUs", number)}${text("leases", "Leases", number)}${text("queue", "Queue", number)}${text("time", "Longest time", { ...number, inputmode: "text" })}</div>
      <div class="submit-row">${text("hours", "GPU-hours", number)}${text("window", "within", { size: 5, placeholder: "7d" })}</div>
      ${form.kind === "group" && text("members", "Members", { placeholder: "ada bob" })}
      <p class="quiet">These take the place of all limits that are set for them. No lease ends; what is over them waits.</p>
      <div role="alert">${wrong && html`<p class="problem">${wrong}</p>`}${problem && html`<p class="problem">${said(problem)}</p>`}</div>
      <div class="dialog-buttons"><button type="button" onClick=${onClose}>Keep it</button><button type="submit" disabled=${!body}>Set limits</button></div>
    </form>
  <//>`;
}
