"""A direct connection takes the body of a request and writes its answer in one piece each.

ASGI hands over both as messages, each through functions of all layers; the answer is then written twice. The hot path
has a whole body and a whole answer nearly always, and finds this object among the extensions of its scope. Relies on
attributes of uvicorn's `RequestResponseCycle` that are not documented: uvicorn's version is pinned.
"""

from __future__ import annotations

import weakref
from asyncio import Transport
from collections.abc import Iterable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

EXTENSION = "gpulease.direct"


class DirectConnection:
    """One request and its answer."""

    __slots__ = ("_weak_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._weak_cycle = weakref.ref(cycle)  # its scope has this object: only the garbage collector would free both

    @property
    def _cycle(self) -> RequestResponseCycle:
        cycle = self._weak_cycle()
        assert cycle is not None, "it runs the request"
        return cycle

    @property
    def is_disconnected(self) -> bool:
        """True if the client has gone. To be asked once the body was taken."""
        cycle = self._cycle
        cycle.flow.resume_reading()
        return cycle.disconnected

    def take_body(self) -> bytes | None:
        """The whole body; None if it has not arrived, or the client has gone. Then `receive` has it, or says so."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer whose headers name its length. False if `send` has to, because the client reads slowly
        or has gone."""
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.response_started = cycle.response_complete = True
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        _send(cycle.transport, b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


def _send(transport: Transport, answer: bytes) -> None:
    """Hand an answer to the kernel: a function of its own, so that a profile shows what that takes."""
    transport.write(answer)


def direct_connection(scope: Scope) -> DirectConnection | None:
    """That of a request; None under another server than the daemon's own, as in tests."""
    found: DirectConnection | None = scope.get("extensions", {}).get(EXTENSION)
    return found
