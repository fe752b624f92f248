// A log that grows: only the rows that are seen are elements, so that a hundred thousand lines scroll.

import { asProblem, token } from "../api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../html.js";
import { setQuery } from "../route.js";
import { readPieces } from "../stream.js";
import { LogFrames } from "./log_frames.js";
import { LogLines } from "./log_lines.js";
import { Refusal } from "./marks.js";

const TAIL = 5000;
const ROW = 18; // pixels
const SPARE = 20; // rows drawn above and below
const WRAPPED = 1000; // rows drawn where lines are wrapped, because their heights differ
const AGAIN_MS = 3000;
const SLOTS = [1, 2, 3]; // logs that keep a connection: a browser has six to a host, for all its windows together
const LATE_MS = 300_000; // after longer only the end is read: much may have been written

/** The log of a job. `ranks`: how many there are; 0 where the launcher knows none. */
export function Log({ job, ranks, query }) {
  const rank = query.rank ?? (ranks ? "all" : "");
  const { lines, version, problem } = useLog(job, rank);
  const [following, setFollowing] = useState(true);
  const [wrap, setWrap] = useState(false);
  const words = (query.grep ?? "").toLowerCase();
  const shown = words ? lines.filter((line) => line.text.toLowerCase().includes(words)) : lines;
  const path = `v1/jobs/${encodeURIComponent(job.id)}/logs`;
  const choices = ranks
    ? ["all", "launcher", ...Array.from({ length: Math.min(ranks, 64) }, (_, at) => String(at))]
    : [];
  const chosen = (choice) => (choice === "launcher" ? "" : choice);
  return html`<section class="sheet log" aria-labelledby="log-title">
    <div class="head"><h2 id="log-title">Log</h2>
      ${choices.length > 0 && html`<div class="choice" role="group" aria-label="Rank">${choices.map((choice) => html`<button type="button" key=${choice} aria-pressed=${chosen(choice) === (query.rank === "launcher" ? "" : rank)} onClick=${() => setQuery({ rank: choice })}>${choice}</button>`)}</div>`}
      <input type="search" class="grep" value=${query.grep ?? ""} placeholder="filter" aria-label="Filter the lines of the log" onInput=${(event) => setQuery({ grep: event.target.value })} />
      <label class="tick"><input type="checkbox" checked=${wrap} onChange=${(event) => setWrap(event.target.checked)} /> Wrap</label>
      <button type="button" aria-pressed=${following} onClick=${() => setFollowing(!following)}>Follow</button>
      ${!token() && html`<a href=${path} download=${`${job.id}.log`}>Download</a>`}
      <span class="facts">${words && `${shown.length} of `}${lines.length >= TAIL && "the last "}${lines.length} lines</span>
    </div>
    ${problem ? html`<${Refusal} problem=${problem} />` : html`<${Rows} lines=${shown} version=${version} wrap=${wrap} following=${following} onFollow=${setFollowing} />`}
  </section>`;
}

function Rows({ lines, version, wrap, following, onFollow }) {
  const place = useRef(/** @type {any} */ (null));
  const [view, setView] = useState({ top: 0, height: 400 });
  useLayoutEffect(() => {
    if (following) place.current.scrollTop = place.current.scrollHeight;
  }, [version, following, lines.length, wrap]);
  const scrolled = () => {
    const { scrollTop, clientHeight, scrollHeight } = place.current;
    setView({ top: scrollTop, height: clientHeight });
    const atEnd = scrollTop + clientHeight >= scrollHeight - ROW;
    if (atEnd !== following && (atEnd || scrollTop < view.top)) onFollow(atEnd);
  };
  const top = Math.max(0, Math.min(view.top, lines.length * ROW - view.height)); // a filter may have left fewer lines
  const first = wrap ? Math.max(0, lines.length - WRAPPED) : Math.max(0, Math.floor(top / ROW) - SPARE);
  const last = wrap ? lines.length : Math.min(lines.length, Math.ceil((top + view.height) / ROW) + SPARE);
  const rows = lines.slice(first, last);
  return html`<div class=${`rows${wrap ? " wrap" : ""}`} ref=${place} onScroll=${scrolled} tabindex="0" role="log" aria-label="Lines of the log" aria-live="off">
    ${lines.length === 0 && html`<p class="none">No output yet.</p>`}
    <div class="pad" style=${{ height: `${wrap ? 0 : first * ROW}px` }}></div>
    ${rows.map((line) => html`<div class="row" key=${line.number}>${line.rank !== null && html`<b class=${`rank line-${Number(line.rank) % 8}`}>${line.rank}</b>`}<span>${line.text || " "}</span></div>`)}
    <div class="pad" style=${{ height: `${wrap ? 0 : (lines.length - last) * ROW}px` }}></div>
  </div>`;
}

/** The lines of a log, and a number that grows with them. Read while the page is visible. */
function useLog(job, rank) {
  const lines = useRef(/** @type {any[]} */ ([]));
  const [state, setState] = useState(/** @type {any} */ ({ version: 0, problem: null }));
  const path = `v1/jobs/${encodeURIComponent(job.id)}/logs?frames=true${rank && rank !== "launcher" ? `&rank=${rank}` : ""}`;
  const started = job.attempts > 0;
  const isOver = useRef(false);
  isOver.current = job.ended_at !== null;
  useEffect(() => {
    lines.current = [];
    setState({ version: 0, problem: null });
    if (!started) return undefined;
    let over = new AbortController();
    let log = new FollowedLog();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const read = async () => {
      clearTimeout(timer);
      over.abort();
      if (document.hidden) return;
      over = new AbortController();
      const { signal } = over;
      if (log.isLate()) log = new FollowedLog();
      const wasOver = isOver.current;
      const take = (next) => {
        lines.current = next;
        setState((before) => ({ version: before.version + 1, problem: null }));
      };
      try {
        await inSlot((follow) => log.read(`${path}&follow=${follow}`, signal, take));
        if (!wasOver && !signal.aborted) timer = setTimeout(read, AGAIN_MS); // it is not followed, the daemon stops, or this token does
      } catch (error) {
        if (signal.aborted) return;
        const problem = asProblem(error);
        const passes = problem.status === 0 || problem.status === 429 || problem.status === 503;
        if (problem.status) setState((before) => ({ ...before, problem }));
        if (passes) timer = setTimeout(read, Math.max(AGAIN_MS, (problem.retryAfterS ?? 0) * 1000));
      }
    };
    document.addEventListener("visibilitychange", read);
    read();
    return () => {
      over.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", read);
    };
  }, [path, started, job.attempts]);
  return { lines: lines.current, ...state };
}

/** Read a log as it is written, by `read(true)`, while fewer than three windows do; else as far as it is now. */
async function inSlot(read) {
  if (!globalThis.navigator?.locks) return read(true); // over plain HTTP no window knows of another
  for (const slot of SLOTS) {
    const had = await navigator.locks.request(`gpulease-log ${slot}`, { ifAvailable: true }, async (lock) => {
      if (lock) await read(true);
      return lock !== null;
    });
    if (had) return undefined;
  }
  return read(false);
}

/** A log as far as it was read, which goes on there when its connection was lost. */
class FollowedLog {
  constructor() {
    this.lines = new LogLines();
    this.decoder = new TextDecoder();
    this.at = "";
    this.heardMs = Date.now();
  }

  /** True if nothing was heard of it for long. */
  isLate() {
    return Date.now() - this.heardMs > LATE_MS;
  }

  /** Give the lines to `take(lines)` whenever more have arrived. Throws Problem. */
  async read(path, signal, take) {
    const frames = new LogFrames();
    const begin = this.at ? `offset=${encodeURIComponent(this.at)}` : `tail=${TAIL}`;
    await readPieces(`${path}&${begin}`, {}, signal, (piece) => {
      frames.add(piece, (bytes, at) => {
        this.at = at;
        this.lines.add(this.decoder.decode(bytes, { stream: true }));
      });
      this.heardMs = Date.now();
      take(this.lines.lines);
    });
  }
}
