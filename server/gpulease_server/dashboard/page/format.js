// Words and formats of gpulease_protocol.status_table, so that page, terminal and curl say the same.
// Pure: no time, no document. tests/dashboard/test_modules.py compares them with Python's.

const GIB = 1024 ** 3;
const UNPRINTABLE = /(?! )[\p{C}\p{Z}]/gu; // also what turns the direction of text around
export const UNKNOWN = "?";

/** A length of time in its two largest units: 42s, 3m 05s, 2h 10m, 3d 4h. */
export function duration(seconds) {
  const whole = Math.max(0, Math.trunc(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.trunc(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.trunc(whole / 3600)}h ${two(Math.trunc((whole % 3600) / 60))}m`;
  return `${Math.trunc(whole / 86400)}d ${Math.trunc((whole % 86400) / 3600)}h`;
}

/** A size in GiB with one digit; ? if unknown. */
export function gibibytes(sizeBytes) {
  return sizeBytes === null ? UNKNOWN : (sizeBytes / GIB).toFixed(1);
}

/** A ratio in percent; ? if unknown. */
export function percent(ratio) {
  return ratio === null ? UNKNOWN : `${Math.round(ratio * 100)}%`;
}

/** A rounded number with its unit; ? if unknown. */
export function amount(value, unit) {
  return value === null ? UNKNOWN : `${Math.round(value)} ${unit}`;
}

/** A place in an order: 1st, 2nd, 3rd, 4th, 11th. */
export function ordinal(number) {
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" };
  return `${number}${suffix[new Intl.PluralRules("en", { type: "ordinal" }).select(number)]}`;
}

/** Text on one line of at most `limit` characters, all of them printable. */
export function plain(text, limit = 60) {
  const letters = [...text.replace(UNPRINTABLE, "?")];
  return letters.length <= limit ? letters.join("") : `${letters.slice(0, limit - 3).join("")}...`;
}

/** A holder in a few words: user, label or job, process. @param {any} holder @param {string | null} job */
export function who(holder, job = null) {
  if (holder === null) return "-";
  const label = job?.startsWith(holder.label) ? "" : holder.label;
  const parts = [plain(holder.user || holder.host || ""), label && `(${plain(label, 30)})`];
  if (job) parts.push(job.startsWith("job-") ? plain(job, 30) : `job ${plain(job, 30)}`);
  else if (holder.owner_pid) parts.push(`pid ${holder.owner_pid}`);
  return parts.filter(Boolean).join(" ") || UNKNOWN;
}

/** The beginning of a UUID. */
export function short(uuid) {
  return uuid.slice(0, 12);
}

/** A demand in a few words. `nameOf(uuid)` says which GPU that is. */
export function askedFor(demand, nameOf = short) {
  const listed = [...demand.indices.map(String), ...demand.uuids.map((uuid) => nameOf(uuid))];
  let what = {
    count: `${demand.count} GPU${demand.count === 1 ? "" : "s"}`,
    listed: `GPU${listed.length === 1 ? "" : "s"} ${listed.join(", ")}`,
    all: "a whole node",
    auto: "every free GPU",
  }[demand.selection];
  if (demand.nodes > 1) what += ` on each of ${demand.nodes} nodes`;
  if (demand.min_free_memory_bytes) what += ` with ${gibibytes(demand.min_free_memory_bytes)} GiB free`;
  if (demand.node) what += ` on ${demand.node}`;
  if (demand.topology === "required") what += ", NVLink between all";
  if (demand.priority && demand.priority !== "normal") what += `, ${demand.priority}`;
  if (demand.preemptible && demand.priority !== "scavenge") what += ", preemptible";
  return plain(what + (demand.gpu_model ? `, model contains ${demand.gpu_model}` : ""), 200);
}

/** GPUs by index, with their node where there are several nodes: "0, 1 of n1". */
export function places(devices, severalNodes) {
  const byNode = new Map();
  for (const device of devices) byNode.set(device.node, [...(byNode.get(device.node) ?? []), device.index]);
  const parts = [...byNode].map(([node, indices]) => indices.join(", ") + (severalNodes ? ` of ${plain(node)}` : ""));
  return parts.join("; ") || "-";
}

/** Output of a user's program, for a block of text: line breaks stay, control sequences are removed. */
export function printed(text) {
  const uncoloured = text.replace(/\u001b\[[0-9;:?]*[ -/]*[@-~]/g, "");
  return uncoloured
    .split("\n")
    .map(overwritten)
    .join("\n")
    .replace(/(?![\n\t ])\p{C}/gu, "?");
}

/** What remains of a line: a carriage return overwrites it, as progress bars do. No regular expression, because that
    takes quadratic time for a line without a return. */
function overwritten(line) {
  let end = line.length;
  while (line[end - 1] === "\r") end -= 1; // nothing came after it
  return line.slice(line.lastIndexOf("\r", end - 1) + 1, end);
}
