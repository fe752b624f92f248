// The dialog: why a lease waits, GPU by GPU, and the end of a job's log. Asked for when it is opened, not before.

import { answer, asProblem, json, limited, Problem } from "./api.js";
import { duration, plain, printed } from "./format.js";
import { cell, element, setText } from "./rows.js";

const MAX_OBSTACLES = 200;
const LINES = 200;
const LOG_LETTERS = 100_000; // shown at most; the end counts
const LOG_READ = 8_000_000;
const VERDICTS = { granted: "Granted.", not_now: "Not now.", never: "Never.", ended: "Ended." };

let again = null;
let turn = 0;

const place = (name) => document.getElementById(`details${name}`);

/** Make the buttons work. Escape closes, too, and the focus goes back to where it was. */
export function prepareDetails() {
  place("-close").addEventListener("click", () => place("").close());
  place("-again").addEventListener("click", () => again?.());
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
    if (text === "") return [element("p", { class: "none", text: "It has printed nothing yet." })];
    return [
      element("p", { class: "facts", text: `${job.id}, the last ${LINES} lines at most` }),
      element("pre", { text: text.length > LOG_LETTERS ? `…${text.slice(-LOG_LETTERS)}` : text }),
    ];
  });
}

function open(heading, fill) {
  setText(place("-heading"), heading);
  place("-body").replaceChildren(element("p", { class: "none", text: "Asking the daemon." }));
  again = () => show(fill);
  if (!place("").open) place("").showModal();
  again();
}

async function show(fill) {
  const own = ++turn;
  let parts;
  try {
    parts = await fill();
  } catch (error) {
    parts = [element("p", { class: "problem", role: "alert", text: asProblem(error).sentence })];
  }
  if (own !== turn) return; // another one was opened meanwhile
  place("-body").replaceChildren(...parts);
  place("-body").scrollTop = place("-body").scrollHeight * Number(parts.some((part) => part.tagName === "PRE"));
}

function explained(why, nameOf) {
  const facts = [];
  if (why.position !== null) facts.push(`Number ${why.position} in the queue.`);
  if (why.passed) facts.push(`Passed ${why.passed} times by younger requests, for ${duration(why.passed_s ?? 0)}.`);
  if (why.held.length) facts.push(`Held for it: ${why.held.slice(0, MAX_OBSTACLES).map(nameOf).join(", ")}.`);
  if (why.behind.length) facts.push(`Behind ${why.behind.slice(0, MAX_OBSTACLES).join(", ")}.`);
  if (why.verdict !== "not_now" || why.obstacles.length === 0) facts.push(plain(why.sentence, 2000));
  const verdict = element("strong", { text: VERDICTS[why.verdict] ?? plain(why.verdict) });
  const parts = [element("p", {}, verdict, ` ${facts.join(" ")}`)];
  if (why.obstacles.length) parts.push(obstacles(why.obstacles.slice(0, MAX_OBSTACLES)));
  const hidden = why.obstacles.length - MAX_OBSTACLES;
  if (hidden > 0) parts.push(element("p", { class: "more", text: `… and ${hidden} more` }));
  return parts;
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

/** The end of a text, of which no more is kept than is shown. */
async function lastLines(path) {
  const came = await answer(path, { signal: limited() });
  const pieces = came.body.pipeThrough(new TextDecoderStream()).getReader();
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
