// Hooks that ask the daemon for what one view shows, while it is shown and the page is visible.

import { asProblem, json } from "../api.js";
import { useEffect, useRef, useState } from "../html.js";

/**
 * The answer of a path. Asked again every `everyMs`; null: only by `again()`. No path, no question.
 * @param {string | null} path
 * @param {number | null} everyMs
 * @returns {{ value: any, problem: import("../api.js").Problem | null, again: () => void }}
 */
export function useAnswer(path, everyMs = null) {
  const [found, setFound] = useState(/** @type {any} */ ({ path, value: null, problem: null }));
  const asked = useRef(() => {});
  useEffect(() => {
    const over = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const ask = async () => {
      clearTimeout(timer);
      if (document.hidden || path === null) return;
      try {
        const { value } = await json(path, over.signal);
        if (!over.signal.aborted) setFound({ path, value, problem: null });
      } catch (error) {
        // Earlier data stay, where the daemon is only busy or away; the line at the top says so.
        if (!over.signal.aborted)
          setFound((before) => ({
            path,
            value: before.path === path ? before.value : null,
            problem: asProblem(error),
          }));
      }
      if (everyMs !== null && !over.signal.aborted) timer = setTimeout(ask, everyMs);
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
  const current = found.path === path ? found : { value: null, problem: null };
  return { value: current.value, problem: current.problem, again: () => asked.current() };
}
