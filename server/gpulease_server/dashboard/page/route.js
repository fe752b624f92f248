// Addresses inside the page: `#/jobs/ID?q=ada`. They work under any path of a proxy, and need no route of the server.

export const VIEWS = ["now", "timeline", "queue", "jobs", "gpus", "leases", "usage", "events", "wall"];

/** @typedef {{ view: string, id: string, query: Record<string, string> }} Route */

/** What an address names; an unknown one is Now. @returns {Route} */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view, ...rest] = path.split("/");
  const known = VIEWS.includes(view);
  return {
    view: known ? view : "now",
    id: known ? decoded(rest.join("/")) : "",
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // someone typed a lone %
  }
}

/** The address of a view, of one thing in it, with this query; empty entries are left out. */
export function address(view, id = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const words = new URLSearchParams(Object.fromEntries(kept)).toString();
  return `#/${view}${id && `/${encodeURIComponent(id)}`}${words && `?${words}`}`;
}

/** Change entries of the query of the address, without a step in the history. */
export function setQuery(changes) {
  const { view, id, query } = parseRoute(location.hash);
  history.replaceState(null, "", address(view, id, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}
