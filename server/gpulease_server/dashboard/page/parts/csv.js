// Tables as files: comma-separated, for a spreadsheet.

import { html } from "../html.js";

/** The text of a file. What a spreadsheet would take for a formula begins with an apostrophe. */
export function csvOf(rows) {
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

function cell(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? "");
  const harmless = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

/** A button that saves what `rows()` returns. */
export function SaveCsv({ name, rows }) {
  const save = () => {
    const address = URL.createObjectURL(new Blob([csvOf(rows())], { type: "text/csv" }));
    const link = Object.assign(document.createElement("a"), { href: address, download: `${name}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  };
  return html`<button type="button" onClick=${save}>CSV</button>`;
}
