// The words of a command line, as a shell takes them apart and puts them together. Pure: nothing is expanded.

/** A word as it is written in a shell. @param {string} word */
export function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** The words of a line with quotes and backslashes; null if a quote is not closed. @param {string} line @returns {string[] | null} */
export function shellWords(line) {
  const words = [];
  let word = /** @type {string | null} */ (null);
  let quote = "";
  for (let at = 0; at < line.length; at += 1) {
    const letter = line[at];
    if (quote) {
      if (letter === quote) quote = "";
      else if (letter === "\\" && quote === '"' && '"\\$`'.includes(line[at + 1] ?? "")) word += line[(at += 1)];
      else word += letter;
    } else if (/\s/.test(letter)) {
      if (word !== null) words.push(word);
      word = null;
    } else if (letter === "'" || letter === '"') {
      quote = letter;
      word ??= "";
    } else if (letter === "\\" && at + 1 < line.length) word = (word ?? "") + line[(at += 1)];
    else word = (word ?? "") + letter;
  }
  if (word !== null) words.push(word);
  return quote ? null : words;
}

const UNITS = { "": 1, s: 1, m: 60, h: 3600, d: 86_400 };

/** A time such as 90, 10m, 2h or 1d in seconds; null if it is none. @param {string} text */
export function seconds(text) {
  const [, number, unit = ""] = /^(\d+(?:\.\d+)?)([smhd]?)$/.exec(text.trim()) ?? [];
  return number === undefined || Number(number) === 0 ? null : Number(number) * UNITS[unit];
}
