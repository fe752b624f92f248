"""The merged log of several nodes, of which some do not send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gpulease_protocol.errors import GpuleaseError, NotFound, Unavailable
from gpulease_protocol.model import JobMember
from gpulease_server.api.streams import gang_log
from gpulease_server.api.streams.gang_log import GangLog

AWAY = Unavailable("node n1 is silent.", remedy="Ask again.")
GONE = NotFound("node n1 is gone.", remedy="It is gone.")


class Node:
    """The log of one node, as a test plays it: what is there, and why it cannot be read."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.problem: GpuleaseError | OSError | None = None
        self.opened: list[tuple[str, int | None]] = []
        self.closed = 0
        self.offset = "0"

    async def open(self) -> None:
        if self.problem is not None:
            raise self.problem

    async def sizes(self) -> tuple[int, int]:
        return 3, 2

    async def take(self, last: bool) -> bytes:
        if self.problem is not None:
            raise self.problem
        if not self.pieces:
            return b""
        piece = self.pieces.pop(0)
        self.offset = str(int(self.offset) + len(piece))
        return piece

    def watch(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def member(rank: int, *, started: bool = True) -> JobMember:
    return JobMember(rank=rank, node=f"n{rank}", address="10.0.0.1", log_directory="/j/logs" if started else None)


def merged(nodes: list[Node], offsets: dict[int, str] | None = None, tail: int | None = None) -> GangLog:
    def source(one: JobMember, offset: str, tail: int | None) -> Any:
        node = nodes[one.rank]
        node.offset = offset
        node.opened.append((offset, tail))
        return node

    return GangLog(source, offsets or {}, tail, asyncio.Event())


async def everything(log: GangLog, *, last: bool = False) -> list[bytes]:
    found = []
    while piece := await log.take(last):
        found.append(piece)
    return found


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_nodes_take_turns_and_each_goes_on_from_its_own_offset() -> None:
    async def story() -> None:
        nodes = [Node(b"a\n", b"b\n"), Node(b"c\n")]
        log = merged(nodes, {1: "7"}, tail=None)
        log.update([member(0), member(1)], last=False)
        await log.open()
        assert (log.offset, await log.sizes()) == ("0/0;1/7", (6, 4))
        assert await everything(log) == [b"a\n", b"c\n", b"b\n"]
        assert log.offset == "0/4;1/9"
        log.close()
        assert [node.closed for node in nodes] == [1, 1]

    play(story)


def test_a_node_that_starts_later_is_read_once_it_has_a_log() -> None:
    async def story() -> None:
        nodes = [Node(b"a\n"), Node(b"b\n")]
        log = merged(nodes, tail=5)
        log.update([member(0), member(1, started=False)], last=False)
        await log.open()
        assert await everything(log) == [b"a\n"]
        log.update([member(0), member(1)], last=False)
        assert await everything(log, last=True) == [b"b\n"], "what is being opened is waited for in the end"
        assert [node.opened for node in nodes] == [[("0", 5)], [("0", 5)]]
        log.close()

    play(story)


def test_a_node_that_falls_silent_is_named_once_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_log, "AGAIN_S", 0.0)

    async def story() -> None:
        nodes = [Node(), Node(b"one\n")]
        members = [member(0), member(1)]
        log = merged(nodes, tail=9)
        log.update(members, last=False)
        await log.open()
        assert await everything(log) == [b"one\n"]
        nodes[1].problem = AWAY
        assert await everything(log) == [b"[n1] [... node n1 is silent.]\n"]
        log.update(members, last=True)
        assert await everything(log, last=True) == []
        assert log.offset == "0/0;1/4"
        nodes[1].problem = None
        nodes[1].pieces = [b"two\n"]
        log.update(members, last=True)
        assert await everything(log, last=True) == [b"two\n"]
        assert nodes[1].opened == [("0", 9), ("4", None), ("4", None)]
        log.close()

    play(story)


def test_a_node_that_is_gone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_log, "AGAIN_S", 0.0)

    async def story() -> None:
        nodes = [Node(b"a\n"), Node()]
        nodes[1].problem = GONE
        log = merged(nodes)
        for _ in range(3):
            log.update([member(0), member(1)], last=True)
            await log.open()
        assert sorted(await everything(log, last=True)) == [b"[n1] [... node n1 is gone.]\n", b"a\n"]
        assert len(nodes[1].opened) == 1
        log.close()

    play(story)


def test_a_log_that_cannot_be_read_is_named_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        nodes = [Node(b"a\n"), Node()]
        nodes[1].problem = OSError(5, "Input/output error")
        log = merged(nodes)
        for _ in range(3):
            log.update([member(0), member(1)], last=False)
            await log.open()
        said = b"[n1] [... The log of node n1 cannot be read: Input/output error]\n"
        assert sorted(await everything(log)) == [said, b"a\n"]
        assert len(nodes[1].opened) == 1, "not before the pause has ended"
        monkeypatch.setattr(gang_log, "AGAIN_S", 0.0)
        nodes[1].problem, nodes[1].pieces = None, [b"b\n"]
        log.update([member(0), member(1)], last=True)
        assert await everything(log, last=True) == [b"b\n"]
        log.close()

    play(story)


def test_if_no_node_sends_the_request_is_refused() -> None:
    async def story() -> None:
        nodes = [Node(), Node()]
        nodes[0].problem, nodes[1].problem = AWAY, GONE
        log = merged(nodes)
        log.update([member(0), member(1)], last=False)
        with pytest.raises(Unavailable, match="silent"):
            await log.open()
        log.close()

    play(story)


def test_closing_gives_up_what_is_being_opened() -> None:
    async def story() -> None:
        hangs, closed = Node(), asyncio.Event()
        hangs.open = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        hangs.close = closed.set  # type: ignore[method-assign]
        log = merged([hangs])
        log.update([member(0)], last=False)
        await asyncio.sleep(0)
        log.close()
        await closed.wait()

    play(story)
