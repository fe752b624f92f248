// One event stream for all windows of a browser: HTTP/1.1 has six connections, and each stream would take one. The window that
// has the lock reads the stream and passes everything on; when it closes or is hidden, the next one goes on where it was.

import { readEvents } from "./stream.js";

/** As `readEvents`, and with other windows of the same user where the browser has locks (not over plain HTTP). */
export async function readSharedEvents(name, lastId, signal, position, happened) {
  if (!globalThis.navigator?.locks || !globalThis.BroadcastChannel)
    return readEvents(lastId(), signal, position, happened);
  const channel = new BroadcastChannel(name);
  channel.onmessage = ({ data }) => {
    if (data.id !== undefined) position(data.id);
    else if (data.kind !== undefined) happened(data.kind, data.data);
  };
  channel.postMessage({ joined: true });
  try {
    await navigator.locks.request(name, { signal }, () => lead(channel, lastId, signal, position, happened));
  } finally {
    channel.close();
  }
}

async function lead(channel, lastId, signal, position, happened) {
  channel.onmessage = ({ data }) => {
    if (data.joined && lastId() !== null) channel.postMessage({ id: lastId() });
  };
  await readEvents(
    lastId(),
    signal,
    (id) => {
      position(id);
      channel.postMessage({ id });
    },
    (kind, data) => {
      happened(kind, data);
      channel.postMessage({ kind, data });
    },
  );
}
