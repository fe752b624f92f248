// Hooks that ask the daemon for what one view shows, while it is shown and the page is visible.

import { asProblem, json } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { Moment, Refusal } from "./marks.js";

/**
 * @typedef {{ value: any, problem: import("../api.js").Problem | null, asOfMs: number | null, again: () => void }} Answer
 * `value` stays when a later request fails: then `problem` says why, and `asOfMs` of when the value is.
 */

const NOTHING = { value: null, problem: null, asOfMs: null };
const LEAST_MS = 3000;
const SELDOM_MS = 60_000;

/**
 * The answer of a path. Asked again every `everyMs`; null: only by `again()`. No path, no question.
 * @param {string | null} path
 * @param {number | null} everyMs
 * @returns {Answer}
 */
export function useAnswer(path, everyMs = null) {
  const [found, setFound] = useState(/** @type {any} */ ({ path, ...NOTHING }));
  const asked = useRef(() => {});
  useEffect(() => {
    const over = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const ask = async () => {
      clearTimeout(timer);
      if (document.hidden || path === null) return;
      let waitMs = everyMs;
      try {
        const { value, asOfMs } = await json(path, over.signal);
        if (!over.signal.aborted) setFound({ path, value, asOfMs, problem: null });
      } catch (error) {
        if (over.signal.aborted) return;
        const problem = asProblem(error);
        setFound((before) => ({ ...(before.path === path ? before : NOTHING), path, problem }));
        waitMs = waitAfter(problem, everyMs);
      }
      if (waitMs !== null && !over.signal.aborted) timer = setTimeout(ask, waitMs);
    };
    asked.current = ask;
    document.addEventListener("visibilitychange", ask);
    ask();
    return () => {
      over.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", ask);
    };
  }, [path, everyMs]);
  const { value, problem, asOfMs } = found.path === path ? found : NOTHING;
  return { value, problem, asOfMs, again: () => asked.current() };
}

/** When to ask again after a refusal: as the daemon says, and once more even where nothing else would ask; seldom if it stays, as of what is unknown. */
function waitAfter({ status, retryAfterS }, everyMs) {
  const passes = status === 0 || status === 429 || status === 503;
  if (passes) return Math.max(everyMs ?? LEAST_MS, LEAST_MS, 1000 * (retryAfterS ?? 0));
  return everyMs === null || status >= 500 ? everyMs : Math.max(everyMs, SELDOM_MS);
}

/** Why there is no value, or why it is not current and how old it is; nothing where all is well. @param {{ answer: Answer }} props */
export function Trouble({ answer: { value, problem, asOfMs } }) {
  if (!problem) return null;
  if (value === null) return html`<${Refusal} problem=${problem} />`;
  if (asOfMs === null) return null;
  return html`<p class="problem">As of <${Moment} at=${new Date(asOfMs).toISOString()} />. ${problem.sentence}</p>`;
}
