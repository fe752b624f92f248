// A small form for a job. It says beside it how a terminal does the same; whatever is not here, a terminal can.

import { asProblem, send } from "../api.js";
import { html, useRef, useState } from "../html.js";
import { address } from "../route.js";
import { newKey, said } from "./action.js";
import { Dialog } from "./dialog.js";
import { quoted, seconds, shellWords } from "./shell_words.js";

const LAUNCHERS = ["", "torchrun", "accelerate", "deepspeed", "lightning", "fabric", "plain"];
const PRIORITIES = ["interactive", "normal", "scavenge"];
const EMPTY = {
  command: "",
  gpus: "1",
  launcher: "",
  priority: "normal",
  preemptible: false,
  name: "",
  directory: "",
  timeout: "",
};

/** The request that a form asks for, and the same in a terminal; or what is wrong with it. @returns {{ body?: any, line?: string, wrong?: string }} */
export function requestOf({ command, gpus, launcher, priority, preemptible, name, directory, timeout }) {
  const words = shellWords(command);
  if (words === null) return { wrong: "A quote in the command is not closed." };
  if (!words.length) return { wrong: "" };
  if (!/^[1-9]\d{0,3}$/.test(gpus)) return { wrong: "GPUs: a number from 1." };
  if (directory && !directory.startsWith("/")) return { wrong: "The directory begins with /." };
  const timeoutS = timeout ? seconds(timeout) : null;
  if (timeout && timeoutS === null) return { wrong: "The time limit is like 90, 30m, 2h or 1d." };
  const agrees = preemptible && priority !== "scavenge"; // which says it already
  const body = {
    command: words,
    gpus: Number(gpus),
    ...(launcher && { launcher }),
    ...(priority !== "normal" && { priority }),
    ...(agrees && { preemptible }),
    ...(name && { name }),
    ...(directory && { working_directory: directory }),
    ...(timeoutS && { timeout_s: timeoutS }),
  };
  const options = [
    ...(Number(gpus) === 1 ? [] : ["-n", gpus]),
    ...(launcher ? ["--launcher", launcher] : []),
    ...(priority === "normal" ? [] : ["--priority", priority]),
    ...(agrees ? ["--preemptible"] : []),
    ...(name ? ["--name", name] : []),
    ...(timeout ? ["--time", timeout.trim()] : []),
  ];
  const line = ["gpulease", "submit", ...options, "--", ...words].map(quoted).join(" ");
  return { body, line: directory ? `cd ${quoted(directory)} && ${line}` : line };
}

/** The button and its form. */
export function Submit() {
  const [open, setOpen] = useState(false);
  return html`<button type="button" onClick=${() => setOpen(true)}>Submit a job…</button>
    ${open && html`<${Form} onClose=${() => setOpen(false)} />`}`;
}

function Form({ onClose }) {
  const [fields, setFields] = useState(EMPTY);
  const [problem, setProblem] = useState(/** @type {any} */ (null));
  const key = useRef(newKey());
  const sending = useRef(false);
  const { body, line, wrong } = requestOf(fields);
  const change = (name) => (event) => {
    key.current = newKey(); // it is another job now
    setFields({ ...fields, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  };
  const submit = async (event) => {
    event.preventDefault();
    if (sending.current || !body) return;
    sending.current = true;
    try {
      const job = await send("POST", "v1/jobs", body, key.current);
      onClose();
      location.hash = address("jobs", job.id);
    } catch (error) {
      setProblem(asProblem(error));
    } finally {
      sending.current = false;
    }
  };
  const text = (name, title, more = {}) =>
    html`<label>${title} <input type="text" name=${name} value=${fields[name]} onInput=${change(name)} autocomplete="off" spellcheck=${false} ...${more} /></label>`;
  return html`<${Dialog} title="Submit a job" onClose=${onClose} closes=${false}>
    <form class="submit" onSubmit=${submit}>
      ${text("command", "Command", { required: true, placeholder: "train.py --epochs 3", autofocus: true })}
      <div class="submit-row">
        ${text("gpus", "GPUs", { inputmode: "numeric", size: 4 })}
        <label>Launcher <select name="launcher" value=${fields.launcher} onChange=${change("launcher")}>${LAUNCHERS.map((name) => html`<option key=${name} value=${name}>${name || "automatic"}</option>`)}</select></label>
        <label>Priority <select name="priority" value=${fields.priority} onChange=${change("priority")}>${PRIORITIES.map((name) => html`<option key=${name}>${name}</option>`)}</select></label>
        <label class="tick"><input type="checkbox" name="preemptible" checked=${fields.preemptible || fields.priority === "scavenge"} disabled=${fields.priority === "scavenge"} onChange=${change("preemptible")} title="It may end, after a notice, for the first request that waits; then it is queued again" /> Preemptible</label>
        ${text("name", "Name")}
        ${text("timeout", "Time limit", { placeholder: "2h", size: 6 })}
      </div>
      ${text("directory", "Directory", { placeholder: "/home/ada/llama" })}
      <p class="quiet">It runs as you, without the variables of a shell. In a terminal, with them: ${line ? html`<code>${line}</code>` : "…"}</p>
      <div role="alert">${wrong && html`<p class="problem">${wrong}</p>`}${problem && html`<p class="problem">${said(problem)}</p>`}</div>
      <div class="dialog-buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" disabled=${!body}>Submit</button></div>
    </form>
  <//>`;
}
