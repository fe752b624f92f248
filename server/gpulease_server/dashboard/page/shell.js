// The shell of every view: the bar at the top, problems, and the line that says that the page is not current.

import { setToken, token } from "./api.js";
import { moment, nowMs, realMs } from "./clock.js";
import { plain } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { problems } from "./model.js";
import { Link, State } from "./parts/marks.js";
import { setQuery } from "./route.js";
import { setTheme, theme, THEMES } from "./theme.js";
import { SignIn } from "./views/sign_in.js";
import { Events } from "./views/events.js";
import { GpuPage } from "./views/gpu.js";
import { JobPage } from "./views/job.js";
import { Jobs } from "./views/jobs.js";
import { LeasePage } from "./views/lease.js";
import { Now } from "./views/now.js";
import { Queue } from "./views/queue.js";
import { Timeline } from "./views/timeline.js";
import { UsageView } from "./views/usage.js";
import { Wall } from "./views/wall.js";

const FIRST_PROBLEMS = 2;
const TABS = [
  { view: "now", name: "Now", also: ["gpus"] },
  { view: "timeline", name: "Timeline", also: [] },
  { view: "queue", name: "Queue", also: ["leases"], list: "queued" },
  { view: "jobs", name: "Jobs", also: [], list: "working" },
  { view: "usage", name: "Usage", also: [] },
  { view: "events", name: "Events", also: [] },
  { view: "wall", name: "Wall", also: [] },
];

/** The whole page. `data` is null until everything has arrived once. */
export function App({ data, route, status, on }) {
  const { view, id, query } = route;
  const q = query.q ?? "";
  useFocusOnChange(`${view}/${id}`);
  useSearchKey();
  const wall = view === "wall" && !status.refused;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    ${!wall && html`<${TopBar} data=${data} route=${route} status=${status} />`}
    ${data && html`<${Problems} found=${problems(data, nowMs())} />`}
    <${Notice} status=${status} />
    ${status.refused && html`<${SignIn} problem=${token() ? status.refused.message : ""} onToken=${on.token} />`}
    <main id="main" class=${`view-${view}`}>
      ${data && !status.refused && html`<${View} view=${view} id=${id} q=${q} query=${query} data=${data} asOfMs=${status.currentMs} />`}
      ${!data && !status.refused && html`<p class="none loading">Loading...</p>`}
    </main>
    ${!wall && html`<footer><p>Times are in your time zone. <a href="docs">API</a></p></footer>`}`;
}

function View({ view, id, q, query, data, asOfMs }) {
  const known = { data, id, q, query, asOfMs };
  if (view === "timeline") return html`<${Timeline} ...${known} />`;
  if (view === "queue") return html`<${Queue} ...${known} />`;
  if (view === "jobs") return id ? html`<${JobPage} key=${id} ...${known} />` : html`<${Jobs} ...${known} />`;
  if (view === "gpus" && id) return html`<${GpuPage} key=${id} ...${known} />`;
  if (view === "leases" && id) return html`<${LeasePage} key=${id} ...${known} />`;
  if (view === "usage") return html`<${UsageView} ...${known} />`;
  if (view === "events") return html`<${Events} ...${known} />`;
  if (view === "wall") return html`<${Wall} ...${known} />`;
  return html`<${Now} ...${known} />`;
}

function TopBar({ data, route, status }) {
  const { view, query } = route;
  return html`<header>
    <${Link} view="now" class="brand">gpulease<//>
    <nav aria-label="Views">${TABS.map(({ view: name, name: title, also, list }) => {
      const current = name === view || also.includes(view);
      const count = data && list ? data[list].items.length : 0;
      return html`<${Link} key=${name} view=${name} query=${{ q: query.q }} aria-current=${current ? "page" : null}>${title}${count ? html` <span class="count">${count}${list && data[list].more ? "+" : ""}</span>` : null}<//>`;
    })}</nav>
    <div class="tools">
      <${Search} q=${query.q ?? ""} />
      <${ThemeSwitch} />
      ${data?.me && html`<span class="me" title=${`${data.me.role}, known by ${data.me.identified_by}`}>${plain(data.me.user, 24)}</span>`}
      ${token() && !status.refused && html`<button type="button" onClick=${signOut}>Sign out</button>`}
      <${Live} status=${status} ready=${data !== null} />
    </div>
  </header>`;
}

function Search({ q }) {
  const [text, setText] = useState(q);
  const place = useRef(/** @type {any} */ (null));
  useEffect(() => {
    if (place.current !== document.activeElement) setText(q);
  }, [q]);
  const typed = (event) => {
    setText(event.target.value);
    setQuery({ q: event.target.value.trim() });
  };
  return html`<input id="search" type="search" ref=${place} value=${text} onInput=${typed} placeholder="user, job, GPU   /" aria-label="Search users, jobs and GPUs" autocomplete="off" spellcheck=${false} />`;
}

function ThemeSwitch() {
  const [chosen, choose] = useState(theme());
  const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  const change = () => {
    setTheme(next);
    choose(next);
  };
  return html`<button type="button" class="theme" onClick=${change} aria-label=${`Theme: ${chosen}. Change to ${next}.`} title=${`Theme: ${chosen}`}>
    <svg viewBox="0 0 12 12" aria-hidden="true"><circle cx="6" cy="6" r="5" /><path d="M6 1a5 5 0 0 1 0 10z" /></svg><span>${chosen}</span></button>`;
}

function Live({ status, ready }) {
  const word = status.lost ? "offline" : status.standby ? "standby" : ready && !status.refused ? "live" : "connecting";
  return html`<span class=${`live is-${word}`}><i aria-hidden="true"></i>${word}</span>`;
}

/** What is wrong now; nothing where all is well. */
function Problems({ found }) {
  const [all, setAll] = useState(false);
  if (!found.length) return null;
  const shown = all ? found : found.slice(0, FIRST_PROBLEMS);
  return html`<section class="problems" aria-label="Problems"><b class="problem-count">${found.length} ${found.length === 1 ? "problem" : "problems"}</b>
    <ul>${shown.map((one) => html`<li key=${one.key}><${State} state=${one.state} word="" /><${Link} view=${one.view} id=${one.id} query=${one.query}>${one.text}<//></li>`)}</ul>
    ${found.length > FIRST_PROBLEMS && html`<button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${found.length}`}</button>`}
  </section>`;
}

/** The line that says that the page is not current, and how old its data are. */
function Notice({ status }) {
  const text = noticeOf(status);
  const isOlder = status.version !== status.versionOfPage;
  return html`<div id="notice" role="status" aria-live="polite">${text && html`<p class="notice">${text}${status.lost && html` <button type="button" onClick=${status.hurry}>Retry now</button>`}</p>`}
    ${isOlder && html`<p class="notice">This page is of gpulease ${plain(status.versionOfPage)}, and the daemon is ${plain(status.version)} now. <button type="button" onClick=${() => location.reload()}>Reload</button></p>`}</div>`;
}

function noticeOf({ lost, lostMs, currentMs, standby }) {
  if (lost) {
    const what =
      lost.status === 0 ? `Disconnected at ${moment(lostMs)}, retrying.` : `Not current since ${moment(lostMs)}.`;
    const why = lost.status === 0 && !lost.fields.detail ? "" : ` ${plain(lost.sentence, 400)}`;
    return what + why + (currentMs === null ? "" : ` Data from ${moment(currentMs)}.`);
  }
  if (!standby) return "";
  return `This daemon is a standby; the writer is ${plain(standby, 200)}.${realMs() - currentMs > 10_000 ? ` Data from ${moment(currentMs)}.` : ""}`;
}

function signOut() {
  setToken("");
  location.reload();
}

function skip(event) {
  event.preventDefault();
  focusView();
}

function focusView() {
  /** @type {HTMLElement | null} */ (document.querySelector("main h1"))?.focus();
}

/** Who goes to another view by a link is at its heading, as after the load of a page; and by Back where they were. */
function useFocusOnChange(place) {
  const before = useRef(place);
  useEffect(() => {
    if (before.current === place) return;
    before.current = place;
    focusView();
    scrollTo(0, history.state?.scrolled ?? 0);
  }, [place]);
  useEffect(() => {
    const clicked = ({ target }) => {
      if (target instanceof Element && target.closest('a[href^="#/"]')) history.replaceState({ scrolled: scrollY }, "");
    };
    addEventListener("click", clicked, true);
    return () => removeEventListener("click", clicked, true);
  }, []);
}

/** `/` goes to the search, where no one is typing. */
function useSearchKey() {
  useEffect(() => {
    const pressed = (event) => {
      const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
      event.preventDefault();
      document.getElementById("search")?.focus();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}
