// What a user may do to a thing: a button, and a dialog that says what it ends. Each click is one request, even when it is made
// twice; the daemon decides, and its words are shown as they are.

import { asProblem, send } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { plain } from "../format.js";
import { Dialog } from "./dialog.js";

/**
 * True if the caller may do an operation of the API, such as `cancelJob`: to whatever it is, or because `user`, who holds it, is
 * they. A daemon that does not tell what they may is asked by their role. @param {any} me @param {string} operation
 * @param {string | null} user
 */
export function may(me, operation, user = null) {
  if (!me) return false;
  const isTheirs = user !== null && me.user === user;
  if (!me.may?.length && !me.may_own?.length) return me.role === "admin" || (me.role === "user" && isTheirs);
  return me.may.includes(operation) || (isTheirs && me.may_own.includes(operation));
}

/**
 * A button with its dialog. `verb` and `subject` name it ("Cancel", "llama8b"); `consequence` says what it ends; `body(reason)`
 * is what is sent to `path` by `method`; `asksWhy`: a reason can be given; `onDone` is called once the daemon has done it; `offered`: whether
 * there is a button. A dialog that is open stays as it is, whatever changes meanwhile: the daemon refuses what is no longer so.
 */
export function Action({
  verb,
  subject,
  consequence,
  path,
  method = "POST",
  body = () => ({}),
  asksWhy = false,
  danger = true,
  offered = true,
  onDone,
}) {
  const [asked, setAsked] = useState(/** @type {any} */ (null));
  const used = useRef(false);
  useEffect(() => {
    if (offered || asked || !used.current || document.activeElement !== document.body) return;
    /** @type {HTMLElement | null} */ (document.querySelector("main h1"))?.focus({ preventScroll: true }); // the button is gone
  }, [offered, asked]);
  const done = () => {
    setAsked(null);
    onDone?.();
  };
  const ask = () => {
    used.current = true;
    setAsked({ verb, subject, consequence, path, method, body, asksWhy, danger });
  };
  return html`${offered && html`<button type="button" class="act" onClick=${ask}>${verb}…</button>`}
    ${asked && html`<${Confirm} ...${asked} onClose=${() => setAsked(null)} onDone=${done} />`}`;
}

function Confirm({ verb, subject, consequence, path, method, body, asksWhy, danger, onClose, onDone }) {
  const keep = useRef(/** @type {any} */ (null));
  const key = useRef(newKey()); // of one click, and the same for a second try
  const sending = useRef(false);
  const [reason, setReason] = useState("");
  const [problem, setProblem] = useState(/** @type {any} */ (null));
  useEffect(() => keep.current.focus(), []);
  const act = async () => {
    if (sending.current) return;
    sending.current = true;
    try {
      await send(method, path, body(reason.trim()), key.current);
      onDone();
    } catch (error) {
      setProblem(asProblem(error));
    } finally {
      sending.current = false;
    }
  };
  return html`<${Dialog} title=${`${verb} ${plain(subject)}?`} onClose=${onClose} closes=${false}>
    <p>${consequence}</p>
    ${asksWhy && html`<label>Reason, for those who wait <input type="text" class="reason-text" maxlength="200" value=${reason} onInput=${(event) => setReason(event.target.value)} /></label>`}
    <div role="alert">${problem && html`<p class="problem">${said(problem)}</p>`}</div>
    <div class="dialog-buttons">
      <button type="button" ref=${keep} onClick=${onClose}>Keep it</button>
      <button type="button" class=${danger ? "danger" : ""} onClick=${act}>${verb} ${plain(subject)}</button>
    </div>
  <//>`;
}

/** The daemon's words, but for an argument that the page does not have; and where no one knows whether it was done, that. */
export function said(problem) {
  const sentence = problem.sentence.replace(/, or [^.]*"force": true[^.]*/, "");
  const unknown = problem.status === 0 || problem.fields.outcome === "unknown";
  return sentence + (unknown ? " It is not known whether this was done: look at the state, or try again." : "");
}

/** A key by which the daemon knows a request that is sent twice. */
export function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
