"""Events as a stream: told at once, each once, none left out; bounded, and ended when the daemon ends."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpulease import AsyncClient, Client, EventsPruned
from gpulease_protocol.model import Event
from gpulease_protocol.sse import EventStreamParser
from gpulease_server.api.streams import event_stream
from gpulease_server.runtime.recent_events import MAX_EVENTS, RecentEvents
from tests.daemon import DaemonProcess, daemon, events, eventually

PATIENCE_S = 60.0


class Stream:
    """`GET /v1/events` over a bare socket."""

    def __init__(self, running: DaemonProcess, query: str = "", **headers: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
        fields = {"Host": "localhost", "Accept": "text/event-stream", **headers}
        lines = [f"GET /v1/events{query} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self.text = b""
        self.head, self.text = self.until(b"\r\n\r\n")
        self.status = int(self.head.split()[1])

    def until(self, end: bytes) -> tuple[bytes, bytes]:
        """What comes up to this, and what came after it."""
        until_s = time.monotonic() + PATIENCE_S
        while end not in self.text:
            assert time.monotonic() < until_s, f"no {end!r} in {self.text[-2000:]!r}"
            piece = self.socket.recv(65536)
            assert piece, f"ended without {end!r}: {self.text[-2000:]!r}"
            self.text += piece
        before, _, after = self.text.partition(end)
        return before, after

    def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind; what comes before it is passed over."""
        _, self.text = self.until(f"event: {kind}\ndata: ".encode())
        data, self.text = self.until(b"\n\n")
        found: dict[str, Any] = json.loads(data)
        return found

    def rest(self) -> bytes:
        while piece := self.socket.recv(65536):
            self.text += piece
        return self.text


@contextmanager
def stream(running: DaemonProcess, query: str = "", **headers: str) -> Iterator[Stream]:
    made = Stream(running, query, **headers)
    try:
        yield made
    finally:
        made.socket.close()


def lease(running: DaemonProcess) -> dict[str, Any]:
    """One that is granted and given back: some events."""
    made: dict[str, Any] = running.call("POST", "/v1/leases?wait_s=30", {"count": 1}).json
    running.call("POST", f"/v1/leases/{made['id']}/release", {"token": made["token"]})
    return made


def test_a_stream_begins_now_and_sends_new_events(api: DaemonProcess) -> None:
    lease(api)
    with stream(api) as watched:
        assert watched.status == 200
        assert b"content-type: text/event-stream" in watched.head.lower()
        watched.until(b"id: ")
        made = lease(api)
        assert watched.event("lease.granted")["lease_id"] == made["id"]
        assert watched.event("lease.ended")["lease_id"] == made["id"]


def test_a_stream_sends_the_same_events_as_the_pages(api: DaemonProcess) -> None:
    for _ in range(3):
        lease(api)
    pages = events(api)
    client = api.client()
    told = []
    for event in client.watch_events(after=0):
        told.append(event)
        if event.seq >= pages[-1]["seq"]:
            break
    client.close()
    assert [event.seq for event in told] == list(range(1, pages[-1]["seq"] + 1))
    assert [event.kind for event in told] == [event["kind"] for event in pages]


def test_last_event_id_takes_precedence_over_after(api: DaemonProcess) -> None:
    lease(api)
    last = events(api)[-1]["seq"]
    with stream(api, "?after=0", **{"Last-Event-ID": str(last - 1)}) as watched:
        before, _ = watched.until(f"id: {last}\nevent".encode())
        assert b"event:" not in before


@pytest.mark.parametrize("wrong", ["x", "-1", "1" * 19])
def test_an_invalid_last_event_id_is_refused(api: DaemonProcess, wrong: str) -> None:
    answer = api.call("GET", "/v1/events", None, Accept="text/event-stream", **{"Last-Event-ID": wrong})
    assert answer.problem() == (422, "invalid_request")


def test_a_stream_that_continues_after_more_events_than_there_are_is_refused(api: DaemonProcess) -> None:
    """They were of the database before a backup was restored: it would be silent until there are as many."""
    lease(api)
    last = events(api)[-1]["seq"]
    ahead = {"Last-Event-ID": str(last + 1000)}
    answer = api.call("GET", "/v1/events", None, Accept="text/event-stream", **ahead)
    assert answer.problem() == (410, "events_pruned")
    assert "backup" in answer.json["detail"]
    with stream(api, **{"Last-Event-ID": str(answer.json["pruned_seq"])}) as watched:
        assert watched.status == 200
        watched.until(lease(api)["id"].encode())
    client = api.client()
    with pytest.raises(EventsPruned) as told:
        next(client.watch_events(after=last + 1000))
    assert told.value.pruned_seq >= last
    client.close()


def test_both_clients_watch(api: DaemonProcess) -> None:
    client, seen = api.client(), []
    begun, last_seqs = threading.Event(), []

    def watch() -> None:
        for event in client.watch_events(after=0):
            begun.set()
            seen.append(event)
            if last_seqs and event.seq > last_seqs[0]:
                return

    async def watch_too(last_seq: int) -> list[Event]:
        other = AsyncClient(api.url)
        found = []
        async for event in other.watch_events(after=last_seq):
            found.append(event)
            if is_end(event):
                break
        await other.close()
        return found

    def is_end(event: Event) -> bool:
        return event.kind == "lease.ended" and event.lease_id == made["id"]

    lease(api)
    watching = threading.Thread(target=watch)
    watching.start()
    assert begun.wait(PATIENCE_S)
    before = events(api)[-1]["seq"]
    made = lease(api)
    last_seqs.append(events(api)[-1]["seq"])
    lease(api)
    watching.join(PATIENCE_S)
    assert not watching.is_alive()
    client.close()
    assert [event.seq for event in seen] == sorted(event.seq for event in seen)
    assert len([event for event in seen if is_end(event)]) == 1
    assert is_end(asyncio.run(asyncio.wait_for(watch_too(before), PATIENCE_S))[-1])


def test_a_client_continues_after_a_restart_without_a_gap(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running:
        client = Client(running.url, retry_s=PATIENCE_S)
        lease(running)
        watched = client.watch_events(after=0)
        seen = [next(watched)]
        assert running.stop() == 0
        running.start()
        made = lease(running)
        while seen[-1].kind != "lease.ended" or seen[-1].lease_id != made["id"]:
            seen.append(next(watched))
        client.close()
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))


def test_streams_end_at_once_with_the_daemon_and_are_bounded(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running:
        streams = [Stream(running) for _ in range(event_stream.MAX_STREAMS)]
        try:
            assert {one.status for one in streams} == {200}
            refused = running.call("GET", "/v1/events", None, Accept="text/event-stream")
            assert refused.problem() == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert running.call("GET", "/v1/events").status == 200, "pages are no streams"
            streams.pop().socket.close()
            eventually(lambda: opens(running), PATIENCE_S, running.story)
            assert running.stop() == 0
            for one in streams:
                assert b"shutting down" in one.rest()
                assert one.text.endswith(b"0\r\n\r\n"), "it was cut off"
        finally:
            for one in streams:
                one.socket.close()


def opens(running: DaemonProcess) -> bool:
    with stream(running) as one:
        return one.status == 200


def test_old_events_come_from_the_database_and_a_gap_is_reported(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running:
        for _ in range(3):
            lease(running)
        running.stop()
        running.start()
        last = events(running)[-1]["seq"]
        with stream(running, "?after=0") as watched:
            watched.until(f"id: {last}\nevent".encode())
            seqs = [int(line[4:]) for line in watched.text.split(b"\n") if line.startswith(b"id: ")]
            assert seqs[: last + 1] == list(range(last + 1))
            watched.until(lease(running)["id"].encode())
        running.stop()
        with closing(sqlite3.connect(running.data_dir / "gpulease.db")) as database, database:
            database.execute("DELETE FROM event WHERE seq <= 5")
            database.execute("INSERT INTO pruned (id, seq) VALUES (1, 5) ON CONFLICT (id) DO UPDATE SET seq = 5")
        running.options = ("--no-worker",)
        running.start()
        answer = running.call("GET", "/v1/events", None, Accept="text/event-stream", **{"Last-Event-ID": "1"})
        assert answer.problem() == (410, "events_pruned")
        client = running.client()
        with pytest.raises(EventsPruned) as told:
            next(client.watch_events(after=1))
        assert told.value.pruned_seq == answer.json["pruned_seq"] == 5
        assert next(client.watch_events(after=5)).seq == 6
        client.close()


def event(seq: int) -> Event:
    return Event(seq=seq, at=datetime.now(UTC), kind="lease.granted", cause="c")


def test_memory_keeps_the_newest_events_and_says_when_some_are_missing() -> None:
    recent = RecentEvents()
    recent.reset(10)
    assert recent.after(10, 5) == []
    assert recent.after(9, 5) is None, "event 10 is in the database alone"
    for seq in range(11, 11 + MAX_EVENTS + 5):
        recent.add(event(seq))
    assert recent.after(10, 5) is None
    assert [one.seq for one in recent.after(15, 2) or ()] == [16, 17]
    recent.add(event(recent.last_seq + 7))
    assert recent.after(recent.last_seq - 7, 5) is None, "six are missing before it"


def test_a_stream_is_parsed_however_it_is_split() -> None:
    whole = b"retry: 1000\nid: 3\n\n: nothing new\n\n" + b"".join(map(event_stream._frame, (event(4), event(5))))
    for size in (1, 7, 64, len(whole)):
        frames = EventStreamParser()
        found = [one for at in range(0, len(whole), size) for one in frames.feed(whole[at : at + size])]
        assert [(one.seq, one.event is not None) for one in found] == [(3, False), (4, True), (5, True)]


@pytest.mark.parametrize("wrong", [b'{"items": []}', b"<html>\n\n", b"hello: x\n\n"])
def test_an_answer_that_is_not_a_stream_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="not a stream"):
        list(EventStreamParser().feed(wrong))
