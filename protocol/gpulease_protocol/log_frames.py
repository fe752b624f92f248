"""A log as gpulease's own clients receive it: in frames, each with the place at which to continue.

`GET /v1/jobs/{id}/logs?frames=1` answers with frames instead of bare text. One is a line of JSON, then as many bytes
as it says:

    {"at": "1@0:4096,1:812", "bytes": 27}
    [rank 0] epoch 3 loss 0.1...

`at` is a place: the attempt, and the offset in its file, or in the file of each rank; given as `offset` of the next
request it gets what follows, neither more nor less, also where a hole was skipped or a note was put in. `end` is true
in the last frame. An answer that ends without one has broken off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from gpulease_protocol.lazy_dataclass import dataclass

MAX_HEAD_BYTES = 2**20
"""Length of the line that begins a frame, at most: the places of 4,096 ranks are a tenth of that."""
MAX_FRAME_BYTES = 2**24
"""Length of what follows it, at most."""
MEDIA_TYPE = "application/vnd.gpulease.log"
"""Content type of an answer in frames."""


@dataclass(frozen=True, slots=True)
class LogFrame:
    """A piece of a log."""

    at: str
    """The place at which to continue after it."""
    content: bytes = b""
    """What the job wrote, and our notes in it."""
    end: bool = False
    """True in the last one: the job has ended and all is sent, or no more was asked for."""

    def encoded(self) -> bytes:
        """The frame as it is sent."""
        head = {"at": self.at, "bytes": len(self.content)} | ({"end": True} if self.end else {})
        return json.dumps(head).encode() + b"\n" + self.content


class LogFrameParser:
    """Assembles frames from the chunks in which they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[LogFrame]:
        """The frames that this chunk completes. Raises ValueError for anything that is not a frame."""
        self._rest += piece
        while (line := self._rest.find(b"\n")) >= 0:
            head = json.loads(self._rest[:line])
            if not isinstance(head, dict) or not isinstance(head.get("at"), str):
                raise ValueError("that is not a log in frames")
            size = int(head["bytes"])
            if not 0 <= size <= MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes is not accepted")
            if len(self._rest) < line + 1 + size:
                return
            content, self._rest = self._rest[line + 1 : line + 1 + size], self._rest[line + 1 + size :]
            yield LogFrame(head["at"], content, bool(head.get("end")))
        if len(self._rest) > MAX_HEAD_BYTES:
            raise ValueError("that is not a log in frames")
