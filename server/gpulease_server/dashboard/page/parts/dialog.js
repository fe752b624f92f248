// A modal dialog: Escape closes it, and the focus returns to where it was.

import { html, useLayoutEffect, useRef } from "../html.js";

/** A dialog while it is drawn; `onClose` takes it away. */
export function Dialog({ title, onClose, children, closes = true }) {
  const place = useRef(/** @type {any} */ (null));
  useLayoutEffect(() => {
    const dialog = place.current;
    dialog.showModal();
    return () => dialog.close(); // gives the focus back: while it is modal, nothing else takes it
  }, []);
  return html`<dialog ref=${place} aria-labelledby="dialog-title" onClose=${onClose}>
    <div class="dialog-head">
      <h2 id="dialog-title">${title}</h2>
      <div class="dialog-buttons">${closes && html`<button type="button" onClick=${onClose}>Close</button>`}</div>
    </div>
    <div class="dialog-body" tabindex="0" role="region" aria-labelledby="dialog-title">${children}</div>
  </dialog>`;
}
