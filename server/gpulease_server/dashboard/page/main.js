// The page begins here: its data, its address, and when it is drawn.

import { rememberToken, rememberViewersToken, setToken } from "./api.js";
import { freeze, nowMs } from "./clock.js";
import { Follow, LISTS } from "./follow.js";
import { html, render } from "./html.js";
import { colourUsers, presentUsers, totals } from "./model.js";
import { bells, ring, titleMark } from "./parts/bell.js";
import { parseRoute } from "./route.js";
import { App } from "./shell.js";
import { applyTheme } from "./theme.js";

const data = { events: [], me: null, history: null, index: /** @type {any} */ (null) };
/** How current the data are: `lost` is the problem of the last request, `refused` that of the token; and the version of the daemon
 * that the page came from, and that of the one that answers now. */
const status = {
  lost: null,
  lostMs: null,
  currentMs: null,
  standby: null,
  refused: null,
  versionOfPage: null,
  version: null,
  hurry: () => follow.hurry(),
};
let drawPending = false;

/** Draw; where that fails, say so instead of showing what is no longer true. It is tried again every second. */
function draw() {
  drawPending = false;
  try {
    drawPage();
  } catch (error) {
    console.error(error);
    const app = /** @type {HTMLElement} */ (document.getElementById("app"));
    render(null, app);
    render(
      html`<p class="notice" role="alert">This page cannot be drawn: ${String(error)}. Reload it; \`gpulease status\` shows the GPUs.</p>`,
      app,
    );
    document.title = "! gpulease";
  }
}

function drawPage() {
  const ready = LISTS.every((name) => name in data); // else the first round is under way
  const shown = ready ? data : null;
  if (ready) colourUsers(presentUsers(/** @type {any} */ (data)));
  render(
    html`<${App} data=${shown} route=${parseRoute(location.hash)} status=${status} on=${{ token: signIn }} />`,
    /** @type {HTMLElement} */ (document.getElementById("app")),
  );
  document.body.classList.toggle("stale", status.lost !== null || (status.refused !== null && ready));
  drawTitle();
  if (ready) document.body.dataset.drawn = "yes";
}

function drawTitle() {
  document.title = titleMark() + titleOf(LISTS.every((name) => name in data) ? data : null);
}

/** How many GPUs are free, and whether that is current. */
function titleOf(shown) {
  if (shown === null) return "gpulease";
  const free = totals(shown, nowMs()).find(({ key }) => key === "free")?.count;
  return `${status.lost ? "! " : ""}${free} of ${shown.gpus.items.length} free · gpulease`;
}

/** Draw once for all that arrived since the last frame. */
function drawSoon() {
  if (document.hidden) drawTitle(); // no frame comes, and nothing else is seen
  if (drawPending) return;
  drawPending = true;
  requestAnimationFrame(draw);
}

/** Remove all data: the new token may belong to another user. */
function clear() {
  for (const name of LISTS) delete data[name];
  Object.assign(data, { events: [], me: null, history: null });
  Object.assign(status, { lost: null, lostMs: null, currentMs: null, refused: null });
}

function signIn(text, remember) {
  follow.stop(); // no answer to the former token may arrive any more
  setToken(text);
  rememberToken(remember);
  clear();
  draw();
  follow.restart();
}

const follow = new Follow(data, {
  drawn() {
    if (LISTS.every((name) => name in data)) ring(data, drawSoon);
    drawSoon();
  },
  current(standby, asOfMs) {
    freeze(null);
    Object.assign(status, { lost: null, lostMs: null, currentMs: asOfMs, standby, refused: null });
    status.version = data.index?.version ?? status.version;
    status.versionOfPage ??= status.version;
    rememberViewersToken(data.me);
  },
  failed(problem) {
    status.lostMs ??= nowMs();
    status.lost = problem;
    freeze(status.lostMs); // nothing counts down that no one knows of
  },
  refused(problem) {
    Object.assign(status, { refused: problem, lost: null });
    drawSoon();
  },
});

function look() {
  if (document.hidden) return;
  drawSoon(); // what counts the seconds
  follow.look();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) follow.start();
  else if (bells().length) follow.onlyGrants();
  else follow.stop();
  look();
});
addEventListener("online", () => follow.hurry());
addEventListener("hashchange", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);

applyTheme();
draw();
setInterval(look, 1000);
if (!document.hidden) follow.start();
