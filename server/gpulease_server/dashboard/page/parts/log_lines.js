// The lines of a log while it is written: a carriage return overwrites the line of its rank, as progress bars do. Pure.

import { printed } from "../format.js";

const MOST = 100_000; // lines; the newest stay
const LONGEST = 2000; // characters of a line
const LONGEST_REST = 65_536;
const PREFIX = /^\[(?:rank (\d+)|(launcher))\] ?/;
const CUT_PREFIX = /^\[[^\]]{0,12}$/;
const ENDED = /([^\r\n]*)(\r\n|\n|\r(?!$))/g; // a return at the end of a piece may belong to a line feed

let number = 0;

/** @typedef {{ number: number, rank: string | null, text: string }} Line */

/** Lines of a log that arrives in pieces of any size. */
export class LogLines {
  constructor() {
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Map<string | null, Line>} The line of each rank that its next text overwrites. */
    this.unfinished = new Map();
    this.rest = "";
  }

  /** Take the next piece. */
  add(piece) {
    const text = this.rest + piece;
    let end = 0;
    for (const found of text.matchAll(ENDED)) {
      this.put(found[1], found[2] !== "\r");
      end = found.index + found[0].length;
    }
    this.rest = text.slice(end).slice(-LONGEST_REST); // progress without a line's end, for hours
    if (this.rest && !CUT_PREFIX.test(this.rest)) this.put(this.rest, false);
    if (this.lines.length > MOST) this.lines.splice(0, this.lines.length - MOST);
  }

  /** A line as far as it is known; `isOver`: nothing overwrites it. */
  put(text, isOver) {
    const [prefix = "", digits = null, launcher = null] = PREFIX.exec(text) ?? [];
    const rank = digits ?? (launcher && "L");
    const shown = printed(text.slice(prefix.length)).slice(0, LONGEST);
    let line = this.unfinished.get(rank);
    if (!line) {
      number += 1;
      line = { number, rank, text: "" };
      this.lines.push(line);
      this.unfinished.set(rank, line);
    }
    if (shown) line.text = shown;
    if (isOver) this.unfinished.delete(rank);
  }
}
