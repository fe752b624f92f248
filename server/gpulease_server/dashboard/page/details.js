// The dialogs: why a lease waits, GPU by GPU, and the end of a job's log. Fetched when they are opened.

import { answer, asProblem, json, limited, Problem } from "./api.js";
import { duration, ordinal, plain, printed } from "./format.js";
import { cell, element, setText } from "./rows.js";

const MAX_OBSTACLES = 200;
const LINES = 200;
const LOG_LETTERS = 100_000; // shown at most; the end counts
const LOG_READ = 8_000_000;
const VERDICTS = { granted: "Granted.", not_now: "Waiting.", never: "Never.", ended: "Ended." };

let refresh = null;
let turn = 0;

const place = (name) => document.getElementById(`details${name}`);

/** Connect the buttons. Escape also closes the dialog, and the focus returns to where it was. */
export function prepareDetails() {
  place("-close").addEventListener("click", () => place("").close());
  place("-again").addEventListener("click", () => refresh?.());
}

/** Show why a lease waits. `nameOf(uuid)` says which GPU that is. */
export function showWhy(leaseId, nameOf) {
  open(`Why does ${leaseId} wait?`, async () => {
    const { value } = await json(`v1/leases/${encodeURIComponent(leaseId)}/explain`);
    return explained(value, nameOf);
  });
}

/** Show the last lines of a job's log. */
export function showLog(job) {
  open(`Log of ${job.name ? plain(job.name) : job.id}`, async () => {
    const text = printed(await lastLines(`v1/jobs/${encodeURIComponent(job.id)}/logs?tail=${LINES}`));
    if (text === "") return [element("p", { class: "none", text: "No output yet." })];
    return [
      element("p", { class: "facts", text: `${job.id}, last ${LINES} lines` }),
      element("pre", { text: text.length > LOG_LETTERS ? `…${text.slice(-LOG_LETTERS)}` : text }),
    ];
  });
}

function open(heading, fill) {
  setText(place("-heading"), heading);
  place("-body").replaceChildren(element("p", { class: "none", text: "Loading..." }));
  refresh = () => show(fill);
  if (!place("").open) place("").showModal();
  refresh();
}

async function show(fill) {
  const own = ++turn;
  let parts;
  try {
    parts = await fill();
  } catch (error) {
    parts = [element("p", { class: "problem", role: "alert", text: asProblem(error).sentence })];
  }
  if (own !== turn) return; // another dialog was opened meanwhile
  place("-body").replaceChildren(...parts);
  place("-body").scrollTop = place("-body").scrollHeight * Number(parts.some((part) => part.tagName === "PRE"));
}

function explained(why, nameOf) {
  const facts = [];
  if (why.passed) facts.push(`${newer(why.passed)} started first in the last ${duration(why.passed_s ?? 0)}.`);
  if (why.held.length) facts.push(`Reserved for it: ${why.held.slice(0, MAX_OBSTACLES).map(nameOf).join(", ")}.`);
  if (why.behind.length) facts.push(`Behind ${why.behind.slice(0, MAX_OBSTACLES).join(", ")}.`);
  if (why.verdict !== "not_now" || why.obstacles.length === 0) facts.push(plain(why.sentence, 2000));
  const verdict = element("strong", { text: verdictOf(why) });
  const parts = [element("p", {}, verdict, ` ${facts.join(" ")}`)];
  if (why.obstacles.length) parts.push(obstacles(why.obstacles.slice(0, MAX_OBSTACLES)));
  const hidden = why.obstacles.length - MAX_OBSTACLES;
  if (hidden > 0) parts.push(element("p", { class: "more", text: `… and ${hidden} more` }));
  return parts;
}

function verdictOf({ verdict, position }) {
  if (verdict === "not_now" && position !== null) return `Waiting, ${ordinal(position)} in the queue.`;
  return VERDICTS[verdict] ?? plain(verdict);
}

function newer(count) {
  return count === 1 ? "1 newer request" : `${count} newer requests`;
}

function obstacles(found) {
  const heads = ["GPU", "Why not"].map((text) => element("th", { role: "columnheader", scope: "col", text }));
  const rows = found.map((one) => element("tr", { role: "row" },
    cell("GPU", { class: "nowrap", text: `${one.index} of ${plain(one.node)}` }),
    cell("Why not", { text: withoutPlace(one) }),
  ));
  return element("table", { role: "table" },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)),
    element("tbody", { role: "rowgroup" }, ...rows),
  );
}

/** The sentence without the GPU that it begins with, which the row has named. */
function withoutPlace({ sentence, index, node }) {
  const named = `GPU ${index} of ${node} `;
  const rest = sentence.startsWith(named) ? sentence.slice(named.length) : sentence;
  return plain(rest.charAt(0).toUpperCase() + rest.slice(1), 400);
}

/** The end of a text; the beginning is dropped as it arrives. */
async function lastLines(path) {
  const response = await answer(path, { signal: limited() });
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let read = 0;
  try {
    for (;;) {
      const { done, value } = await pieces.read();
      if (done) return text;
      read += value.length;
      text = (text + value).slice(-2 * LOG_LETTERS);
      if (read > LOG_READ) {
        await pieces.cancel();
        return `${text}\n[the rest is too long for this page: gpulease logs]`;
      }
    }
  } catch {
    throw new Problem(0);
  }
}
