// Endless answers, and the daemon's event stream (SSE). Read with fetch, because an EventSource sends no Authorization.

import { answer, Problem } from "./api.js";

const OPEN_MS = 20_000;
const SILENT_MS = 45_000; // the daemon sends a comment, or an empty frame, every 15 s

/** A parser that takes the text of a stream in any pieces, and calls `position(id)` and `happened(kind, data)`. */
export function reader(position, happened) {
  let rest = "";
  let kind = "";
  let data = [];
  const line = (text) => {
    if (text === "") {
      if (data.length) happened(kind || "message", data.join("\n"));
      kind = "";
      data = [];
      return;
    }
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(text) ?? [];
    if (field === "id") position(value);
    else if (field === "event") kind = value;
    else if (field === "data") data.push(value);
  };
  return (piece) => {
    const lines = (rest + piece).split("\n");
    rest = lines.pop() ?? "";
    for (const text of lines) line(text.replace(/\r$/, ""));
  };
}

/** Read events until the stream ends, is silent for too long, or `signal` ends it. Throws Problem. */
export async function readEvents(lastId, signal, position, happened) {
  const headers = { Accept: "text/event-stream", ...(lastId === null ? {} : { "Last-Event-ID": lastId }) };
  const decoder = new TextDecoder();
  const take = reader(position, happened);
  await readPieces("v1/events", headers, signal, (piece) => take(decoder.decode(piece, { stream: true })));
}

/** Give the bytes of an endless answer to `take`, until it ends, is silent for too long, or `signal` ends it. Throws Problem. */
export async function readPieces(path, headers, signal, take) {
  const silent = new AbortController();
  let timer = setTimeout(() => silent.abort(), OPEN_MS);
  try {
    const response = await answer(path, { headers, signal: AbortSignal.any([signal, silent.signal]) });
    const pieces = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
      const { done, value } = await pieces.read();
      if (done) return;
      take(value);
    }
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(0);
  } finally {
    clearTimeout(timer);
  }
}
