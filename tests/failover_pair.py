"""Two daemons on one PostgreSQL database, a worker and clients that know both, and what the clients saw."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from gpulease import Client
from gpulease_protocol import endpoints
from gpulease_protocol.requests import JobRequest
from tests.daemon import DaemonProcess, eventually

CLIENTS, GPUS = 8, 5
WITHIN_S = 90.0


class Pair:
    """A writer and a standby; `swap` tells them apart after a takeover."""

    def __init__(self, directory: Path, *urls: str) -> None:
        self.daemons = [
            DaemonProcess(
                directory / name, "--no-worker", environment={"GPULEASE_DATABASE_URL": url, "GPULEASE_STANDBY": "1"}
            )
            for name, url in zip("ab", urls, strict=True)
        ]
        self.worker: subprocess.Popen[bytes] | None = None
        self._directory = directory

    @property
    def writer(self) -> DaemonProcess:
        return self.daemons[0]

    @property
    def standby(self) -> DaemonProcess:
        return self.daemons[1]

    @property
    def urls(self) -> list[str]:
        return sorted(daemon.url for daemon in self.daemons)

    def swap(self) -> None:
        self.daemons.reverse()

    def start_worker(self) -> None:
        words = ["worker", "--simulate", str(GPUS), "--node", "n1", "--data-dir", str(self._directory / "worker")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
        with (self._directory / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "gpulease_cli", *words],
                env=kept | {"GPULEASE_URL": ",".join(self.urls)},
                stdout=log,
                stderr=log,
            )

    def story(self) -> str:
        return f"{self.writer.story()}\n{self.standby.story()}"

    def close(self) -> None:
        if self.worker is not None:
            self.worker.terminate()
            self.worker.wait(WITHIN_S)
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()


@contextmanager
def pair(directory: Path, url: str, *, first: str | None = None) -> Iterator[Pair]:
    """Both started, with a worker whose GPUs can be granted. `first` is the first writer's URL, where that differs."""
    made = Pair(directory, first or url, url)
    try:
        made.writer.start()
        made.standby.start(ready=False)
        made.start_worker()
        eventually(lambda: "free" in str(made.writer.call("GET", "/v1/gpus").json), WITHIN_S, made.story)
        yield made
    finally:
        made.close()


@dataclass
class Seen:
    """What all clients saw, on one monotonic clock."""

    held: list[tuple[str, float, float]] = field(default_factory=list)
    """GPU, from the answer that granted it until its release was sent."""
    granted: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Token and GPUs by lease."""
    answered_s: list[float] = field(default_factory=list)
    """When any client had an answer to what it asked for."""
    cycles: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    """How often each client was granted GPUs and gave them back."""
    wrong: list[str] = field(default_factory=list)

    def gap_s(self, since_s: float, until_s: float) -> float:
        """The longest time in which no one had an answer."""
        moments = sorted([since_s, *(at_s for at_s in list(self.answered_s) if since_s < at_s < until_s), until_s])
        return max(after - before for before, after in pairwise(moments))

    def overlaps(self) -> list[str]:
        """GPUs that two clients took for theirs at once."""
        found, until = [], dict[str, float]()
        for gpu, from_s, to_s in sorted(self.held, key=lambda hold: hold[1]):
            if from_s < until.get(gpu, 0.0):
                found.append(f"{gpu} from {from_s}, held until {until[gpu]}")
            until[gpu] = max(to_s, until.get(gpu, 0.0))
        return found


class Load:
    """Clients in a loop of wait, hold, renew, release; one that holds a GPU all the time; and a job."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.seen = Seen()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(CLIENTS)]
        self.client = Client(urls)
        self.keeper = self.client.lease(count=1, ttl_s=20, wait_s=WITHIN_S)
        self.job = self.client.submit(JobRequest(command=("sleep", "100000"), launcher="plain"))
        self.client.wait_job(self.job.id, WITHIN_S, until=lambda job: job.started_at is not None)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WITHIN_S)
        self.keeper.release()
        self.client.cancel_job(self.job.id)
        self.client.wait_job(self.job.id, WITHIN_S)
        self.client.close()
        if any(thread.is_alive() for thread in self._threads):
            self.seen.wrong.append("a client waits forever")

    def everyone_goes_on(self, story: Callable[[], str], cycles: int = 1) -> None:
        """Wait until each client has been served so often from now on."""
        wanted = [count + cycles for count in self.seen.cycles]

        def served() -> bool:
            return bool(self.seen.wrong) or all(
                count >= least for count, least in zip(self.seen.cycles, wanted, strict=True)
            )

        eventually(served, WITHIN_S, lambda: f"{self.seen.cycles} of {wanted}; {story()}")
        assert not self.seen.wrong, (self.seen.wrong[:5], story())

    def _live(self, number: int) -> None:
        try:
            with Client(self.urls) as client:
                while not self._over.is_set():
                    self._one(client, number)
        except Exception as error:
            self.seen.wrong.append(f"client {number}: {error!r}")

    def _one(self, client: Client, number: int) -> None:
        seen = self.seen
        lease = client.lease(count=1, ttl_s=20, wait_s=WITHIN_S)
        from_s = time.monotonic()
        seen.answered_s.append(from_s)
        gpus = tuple(gpu.uuid for gpu in lease.gpus)
        seen.granted[lease.id] = (lease.fencing_token or 0, gpus)
        for _ in range(2):
            self._over.wait(0.03)
            client.send(endpoints.renew(lease.id, lease.fencing_token))
            seen.answered_s.append(time.monotonic())
        if lease.lost.is_set():
            seen.wrong.append(f"{lease} was lost")
        to_s = time.monotonic()
        seen.held.extend((gpu, from_s, to_s) for gpu in gpus)
        lease.release()
        seen.answered_s.append(time.monotonic())
        seen.cycles[number] += 1


def check(log: list[dict[str, Any]], load: Load) -> None:
    """No GPU was in two leases, by what the clients saw and by the log, which has all that they were told."""
    from tests.system.test_storm import check_events  # noqa: PLC0415 - that module imports this package

    assert not load.seen.wrong, load.seen.wrong[:5]
    assert not load.keeper.lost.is_set(), "who renewed all the time lost the lease"
    assert load.seen.overlaps() == []
    check_events(log)
    granted = {event["lease_id"]: event for event in log if event["kind"] == "lease.granted"}
    for lease_id, (token, gpus) in load.seen.granted.items():
        assert (granted[lease_id]["token"], tuple(granted[lease_id]["gpus"])) == (token, gpus)
    lost = [event for event in log if event["kind"] == "lease.lost"]
    assert not lost, lost
    starts = [event for event in log if event["kind"] == "job.starting"]
    assert len(starts) == 1, "the job was started again"
