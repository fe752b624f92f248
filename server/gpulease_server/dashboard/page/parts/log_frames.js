// A log as it is followed: in frames, each a line of JSON, then as many bytes as that says. `at` is where to continue. Pure.

/** Assembles frames from the pieces in which they arrive. */
export class LogFrames {
  constructor() {
    this.rest = new Uint8Array();
    this.heads = new TextDecoder();
  }

  /** Give the content of each frame that this piece completes to `take(bytes, at)`. Throws for anything else. */
  add(piece, take) {
    let bytes = new Uint8Array(this.rest.length + piece.length);
    bytes.set(this.rest);
    bytes.set(piece, this.rest.length);
    for (;;) {
      const begin = bytes.indexOf(10) + 1;
      if (begin === 0) break;
      const head = JSON.parse(this.heads.decode(bytes.subarray(0, begin)));
      if (bytes.length < begin + head.bytes) break;
      take(bytes.subarray(begin, begin + head.bytes), head.at);
      bytes = bytes.subarray(begin + head.bytes);
    }
    this.rest = bytes;
  }
}
