// Signing in with a token, where the daemon cannot tell from the connection who asks.

import { html, useEffect, useRef, useState } from "../html.js";

/** The form; `onToken(text, remember)` is called with what was entered. */
export function SignIn({ problem, onToken }) {
  const [text, setText] = useState("");
  const [remember, setRemember] = useState(false);
  const place = useRef(/** @type {any} */ (null));
  useEffect(() => place.current.focus(), [problem]);
  const send = (event) => {
    event.preventDefault();
    setText("");
    onToken(text.trim(), remember);
  };
  return html`<form id="sign-in" class="sheet" onSubmit=${send}>
    <h2>Sign in</h2>
    <p>You are connecting from another host, so gpulease needs a token. An administrator creates one with
      <code> gpulease token create</code>.</p>
    <p id="sign-in-problem" class="problem" role="alert">${problem}</p>
    <label for="token">Token</label>
    <input id="token" ref=${place} type="password" autocomplete="off" spellcheck=${false} required aria-describedby="sign-in-problem" value=${text} onInput=${(event) => setText(event.target.value)} />
    <label class="tick"><input type="checkbox" checked=${remember} onChange=${(event) => setRemember(event.target.checked)} />
      Remember me on this device, if my role is viewer; otherwise until I close this tab</label>
    <button type="submit">Sign in</button>
  </form>`;
}
