"""A daemon that is killed again and again under load: nothing that it has said is lost, and everyone is served.

The clients write down what they were told (`crash_clients.py`), and the checker of the simulation judges by that and by
the event log. `test_storm.py` is about many processes at one moment; this is about many crashes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, events, eventually
from tests.simulation.checker import check

pytestmark = [pytest.mark.slow, pytest.mark.busy]

CLIENTS = 32


class FaultyDaemon(DaemonProcess):
    """One with a fault of `tests/simulation/mutations.py`, or with none."""

    fault: str | None = None

    @property
    def command(self) -> list[str]:
        whole = super().command
        return whole if self.fault is None else [whole[0], "-m", "tests.simulation.mutations", self.fault, *whole[3:]]


class Rounds:
    """A daemon, clients, and one who kills the daemon at instants that a seed decides."""

    def __init__(self, directory: Path, seed: int, fault: str | None, url: str | None) -> None:
        self.chance = random.Random(seed)
        self.running = FaultyDaemon(directory / "d", "--no-worker", *(("--database-url", url) if url else ()))
        self.running.fault = fault
        self.directory = directory / "clients"
        self.directory.mkdir()
        self.lines: list[dict[str, Any]] = []
        self._last_seq = 0
        self.see("clock", wall_s=time.time())

    def see(self, what: str, **more: Any) -> None:
        """Write down what was seen from here."""
        self.lines.append({"what": what, "at_s": time.monotonic(), **more})

    def start(self, *, ready: bool = True) -> None:
        """Start the daemon; it begins to count no sooner than this."""
        self.see("started")
        self.running.start(ready=ready)

    def crash(self) -> None:
        """Kill it at a random instant, mostly when it grants again, and start it; now and then before it is ready."""
        if self.chance.random() < 0.8:
            self.follow()
            eventually(lambda: "lease.granted" in self.follow(), 60, self.running.story)
        time.sleep(self.chance.uniform(0.0, 0.3))
        self.follow()
        time.sleep(self.chance.uniform(0.0, 0.05))
        self.running.kill()
        self.start(ready=self.chance.random() < 0.75)

    def follow(self) -> set[str]:
        """Read what the event log has beyond the last one seen, and must have in the end; the kinds of these."""
        kinds = set()
        answer = self.running.call("GET", f"/v1/events?limit=1000&after={self._last_seq}")
        for event in answer.json["items"] if answer.status == 200 else ():
            self.see("event", event=event)
            self._last_seq = event["seq"]
            kinds.add(event["kind"])
        return kinds

    def hits(self) -> int:
        """How many requests the crashes have left unanswered."""
        return sum(line["at_s"] is None for line in self._written())

    def _written(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.directory.glob("*.jsonl")):
            yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))

    def judge(self) -> list[str]:
        """What the checker says of everything that was seen, once the clients are through."""
        self.lines += self._written()
        cursor: str | None = "999999999"
        while cursor is not None:
            page = self.running.call("GET", f"/v1/leases?limit=1000&cursor={cursor}").json
            for lease in page["items"]:
                self.see("listed", lease=lease)
            cursor = page["next"]
        self.see("over")
        return check(events(self.running), self.lines)


@contextmanager
def worker(running: DaemonProcess, directory: Path) -> Iterator[None]:
    """A worker with eight GPUs that goes on while daemons come and go."""
    command = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", "n", "--simulate", "8"]
    with (directory / "worker.log").open("ab") as output:
        process = subprocess.Popen([*command, "--data-dir", str(directory / "w")], stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def crash_rounds(
    directory: Path, seed: int, rounds: int, fault: str | None = None, url: str | None = None
) -> Iterator[Rounds]:
    """So many crashes under load, then calm until every client has had what it asked for. The daemon ends with it.

    There are more crashes, three times as many at most, where fewer than half of them left a request unanswered.
    `url` is its database; a file of its own when null.
    """
    state = Rounds(directory, seed, fault, url)
    try:
        state.start()
        _crash_under_load(state, directory, rounds)
        yield state
    finally:
        state.running.stop()


def _crash_under_load(state: Rounds, directory: Path, rounds: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.system.crash_clients",
        state.running.url,
        str(CLIENTS),
        str(state.directory),
    ]
    with worker(state.running, directory):
        clients = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            for number in range(3 * rounds):
                if number >= rounds and state.hits() >= rounds // 2:
                    break
                state.crash()
                if clients.poll() is not None:
                    break
            (state.directory / "stop").touch()
            _, complaints = clients.communicate(timeout=240)
            assert clients.returncode == 0, f"{complaints}\n{state.running.story()}"
        finally:
            clients.kill()
            clients.communicate()


def told(state: Rounds, what: str) -> int:
    """How many such calls were answered with success."""
    return sum(line["what"] == what and line.get("status") in (200, 201, 202) for line in state.lines)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 10), *(pytest.param(seed, 50, marks=pytest.mark.soak) for seed in range(2, 8))]
)
def test_nothing_that_was_said_is_lost_by_crashes(tmp_path: Path, seed: int, rounds: int) -> None:
    with crash_rounds(tmp_path, seed, rounds) as state:
        must_have_kept_its_word(state, rounds)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 4), *(pytest.param(seed, 50, marks=pytest.mark.soak) for seed in range(2, 4))]
)
def test_nothing_that_was_said_is_lost_by_crashes_on_postgresql(
    tmp_path: Path, postgres_url: str, seed: int, rounds: int
) -> None:
    with crash_rounds(tmp_path, seed, rounds, url=postgres_url) as state:
        must_have_kept_its_word(state, rounds)


def must_have_kept_its_word(state: Rounds, rounds: int) -> None:
    """The checker finds nothing, and enough has happened for that to mean something."""
    assert state.judge() == []
    done = {what: told(state, what) for what in ("asked", "renewed", "released")}
    print(f"{rounds} crashes: {done}", flush=True)
    assert min(done.values()) >= 2 * rounds, f"too little happened to show anything: {done}"
    assert state.hits() >= rounds // 2, "the crashes hit no request"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_reply_before_the_commit_is_caught(tmp_path: Path) -> None:
    assert complaints_of(tmp_path, "reply_before_commit")


def complaints_of(directory: Path, fault: str) -> list[str]:
    """What clients and checker say of a daemon with this fault."""
    try:
        with crash_rounds(directory, 1, 30, fault) as state:
            return state.judge()
    except AssertionError as error:
        return [str(error)]
