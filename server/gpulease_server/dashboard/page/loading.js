// Loads the page again when one of its modules did not arrive or does not fit the others: nothing else of it runs then.
// It imports nothing, so that it needs no other file.

const KEY = "gpulease.loads";
const LONGEST_WAIT_S = 15;

/** How often in a row this tab was loaded and was not complete; many times where the browser keeps nothing of a page. */
function failures() {
  try {
    return Number(sessionStorage.getItem(KEY) ?? 0);
  } catch {
    return LONGEST_WAIT_S;
  }
}

function keep(count) {
  try {
    sessionStorage.setItem(KEY, String(count));
    if (!count) sessionStorage.removeItem(KEY);
  } catch {
    // it keeps nothing
  }
}

/** Whether the server answers: the browser's own page of an error would not try again. */
async function answers() {
  try {
    await fetch("dashboard/main.js", { cache: "no-store" });
    return true;
  } catch {
    return false;
  }
}

async function loadAgain() {
  if (!(await answers())) return waitAndLoad();
  keep(failures() + 1);
  location.reload();
}

function waitAndLoad() {
  setTimeout(loadAgain, 1000 * Math.min(LONGEST_WAIT_S, 2 ** failures()));
}

function tell() {
  const notice = document.createElement("p");
  notice.className = "notice";
  notice.setAttribute("role", "alert");
  notice.textContent =
    "This page is not complete: one of its files did not arrive, or is of another release. It is loaded again in some seconds. `gpulease status` shows the GPUs.";
  document.getElementById("app")?.replaceChildren(notice);
  document.title = "! gpulease";
}

/** Whether a style sheet has rules: one that failed is empty, or throws. @param {HTMLLinkElement} link */
function hasRules({ sheet }) {
  try {
    return Boolean(sheet?.cssRules.length);
  } catch {
    return false;
  }
}

/** Ask again for a style sheet that did not arrive; the page is of use without it. @param {HTMLLinkElement} link */
function askForStyles(link, waitS = 1) {
  const again = /** @type {HTMLLinkElement} */ (link.cloneNode());
  const longerS = Math.min(LONGEST_WAIT_S, 2 * waitS);
  again.addEventListener("error", () => setTimeout(() => askForStyles(again, longerS), 1000 * waitS));
  link.replaceWith(again);
}

let failed = false;

function fail() {
  if (failed) return;
  failed = true;
  tell();
  waitAndLoad();
}

// Loading errors do not bubble. The script element of main.js tells of all modules that it needs.
addEventListener("error", ({ target }) => target instanceof HTMLScriptElement && fail(), true);
addEventListener("load", () => {
  if (!document.getElementById("app")?.firstChild) fail(); // all arrived, and do not fit together: they are of two releases
  if (!failed) keep(0);
  /** @type {NodeListOf<HTMLLinkElement>} */ (document.querySelectorAll("link[rel=stylesheet]")).forEach((link) => {
    if (!hasRules(link)) askForStyles(link);
  });
});
