// A modal dialog: Escape closes it, and the focus returns to where it was.

import { html, useLayoutEffect, useRef } from "../html.js";

/** A dialog while it is drawn; `onClose` takes it away. */
export function Dialog({ title, onClose, children, closes = true }) {
  const place = useRef(/** @type {any} */ (null));
  useLayoutEffect(() => {
    const before = document.activeElement;
    place.current.showModal();
    return () => before instanceof HTMLElement && before.isConnected && before.focus();
  }, []);
  return html`<dialog ref=${place} aria-labelledby="dialog-title" onClose=${onClose}>
    <div class="dialog-head">
      <h2 id="dialog-title">${title}</h2>
      <div class="dialog-buttons">${closes && html`<button type="button" onClick=${onClose}>Close</button>`}</div>
    </div>
    <div class="dialog-body" tabindex="0" role="region" aria-labelledby="dialog-title">${children}</div>
  </dialog>`;
}
