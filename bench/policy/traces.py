"""Reads workloads of others as requests. Where these name no users, users are drawn, which each reader says."""

from __future__ import annotations

import csv
import math
import random
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from gpulease_protocol.model import Demand
from gpulease_server.replay.recorded_requests import RecordedRequest, ReplayedNode, over_nodes

TIRESIAS = Path(__file__).parent / "tiresias" / "60_job.csv"
SERVICE_S = 1000.0
"""How long a request of `poisson` lasts on average."""
USERS = 8
"""Drawn for traces without users."""
MAX_BYTES = 64 * 2**20
"""Of a file that is fetched."""
POLLUX_SERVICE_S = {
    ("bert", 6): 3131.0, ("bert", 8): 2489.0, ("bert", 12): 1658.0, ("bert", 16): 1364.0,
    ("cifar10", 6): 940.0, ("cifar10", 8): 898.0, ("cifar10", 12): 655.0, ("cifar10", 16): 515.0,
    ("deepspeech2", 6): 4181.0, ("deepspeech2", 8): 3566.0, ("deepspeech2", 12): 2520.0,
    ("imagenet", 24): 31500.0, ("imagenet", 32): 26250.0, ("imagenet", 48): 20750.0,
    ("ncf", 1): 77.0, ("yolov3", 4): 14138.0,
}  # fmt: skip
"""By application and number of GPUs, because the workloads have no durations: the shortest completion that is published
for jobs of that size, in `results-jobload/tiresias-1.0/summary.json` of the artifact. Those of imagenet all waited; the
three figures are fitted to its four jobs in `FITTED_WORKLOAD`."""
FITTED_WORKLOAD = 4
POLLUX_PUBLISHED_S = {
    1: 2473.65, 2: 5144.9625, 3: 3876.25625, 4: 3280.2625, 5: 3501.0125, 6: 3469.69375, 7: 5479.9125, 8: 5079.70625,
}  # fmt: skip
"""By workload: the mean completion time that is published for the artifact's own Tiresias, which keeps a job's size."""


def tiresias(file: Path = TIRESIAS) -> list[RecordedRequest]:
    """The 60 jobs of Tiresias' simulator (Apache-2.0). Users are drawn."""
    with file.open(newline="") as lines:
        jobs = [
            (f"job-{row['job_id']}", float(row["submit_time"]), float(row["duration"]), int(row["num_gpu"]))
            for row in csv.DictReader(lines)
        ]
    return with_drawn_users(_requests(jobs))


def pollux(file: Path) -> list[RecordedRequest]:
    """160 jobs of a workload of Pollux' artifact (petuum/adaptdl, branch osdi21-artifact, no licence stated), with the
    durations of `POLLUX_SERVICE_S`. Users are drawn."""
    with file.open(newline="") as lines:
        jobs = [
            (row["name"], float(row["time"]), POLLUX_SERVICE_S[row["application"], replicas], replicas)
            for row in csv.DictReader(lines)
            for replicas in [int(row["num_replicas"])]
        ]
    return with_drawn_users(_requests(jobs))


def philly(source: str) -> list[RecordedRequest]:
    """Jobs of Microsoft's Philly, as the artifact of Pollux has them; `source` is a path, or an https address.

    The columns are timestamp, duration, num_gpus, gpu_time, cluster. The users are the virtual clusters, which are
    groups of people; none is drawn.
    """
    lines = fetched(source) if "://" in source else Path(source).read_text().splitlines()
    rows = [
        (datetime.fromisoformat(row["timestamp"]), float(row["duration"]), int(row["num_gpus"]), row["cluster"])
        for row in csv.DictReader(lines)
    ]
    rows.sort()
    return [
        RecordedRequest(
            id=f"job-{number}",
            asked_at_s=(at - rows[0][0]).total_seconds(),
            duration_s=duration_s,
            demand=Demand(count=gpus),
            user=cluster,
        )
        for number, (at, duration_s, gpus, cluster) in enumerate(rows)
    ]


def gavel(files: Iterable[Path], service_s: float = 3600.0) -> list[RecordedRequest]:
    """Arrivals and sizes of virtual clusters in Gavel's traces (MIT), one user for each file.

    The traces say steps and not seconds: durations are drawn (lognormal around `service_s`, sigma 2), by the line.
    """
    jobs = []
    for file in sorted(files):
        chance = random.Random(file.stem)  # noqa: S311
        for line in file.read_text().splitlines():
            fields = line.split("\t")
            duration_s = min(max(1.0, chance.lognormvariate(math.log(service_s), 2.0)), 30 * 24 * 3600.0)
            jobs.append((float(fields[-2]), file.stem, duration_s, int(fields[-1])))
    return [
        RecordedRequest(
            id=f"job-{number}", asked_at_s=at_s, duration_s=duration_s, demand=Demand(count=gpus), user=user
        )
        for number, (at_s, user, duration_s, gpus) in enumerate(sorted(jobs))
    ]


def poisson(number: int, gpus: int, load: float, seed: int = 1) -> list[RecordedRequest]:
    """Requests for a GPU each that come as a Poisson process and last exponentially: what Erlang's formula is about."""
    chance, at_s, jobs = random.Random(seed), 0.0, []  # noqa: S311
    for index in range(number):
        at_s += chance.expovariate(load * gpus / SERVICE_S)
        jobs.append((f"job-{index}", at_s, chance.expovariate(1 / SERVICE_S), 1))
    return _requests(jobs)


def _requests(jobs: Iterable[tuple[str, float, float, int]]) -> list[RecordedRequest]:
    return [
        RecordedRequest(id=name, asked_at_s=at_s, duration_s=duration_s, demand=Demand(count=gpus), user="-")
        for name, at_s, duration_s, gpus in jobs
    ]


def with_drawn_users(requests: Sequence[RecordedRequest], users: int = USERS, seed: int = 1) -> list[RecordedRequest]:
    """The same requests by synthetic users: the n-th asks 1/n times as often as the first (Zipf)."""
    chance = random.Random(seed)  # noqa: S311
    names = [f"user{number}" for number in range(1, users + 1)]
    weights = [1 / number for number in range(1, users + 1)]
    return [replace(one, user=chance.choices(names, weights)[0]) for one in requests]


def on_nodes(requests: Iterable[RecordedRequest], nodes: Sequence[ReplayedNode]) -> Iterator[RecordedRequest]:
    """The requests with as many nodes as they need: more GPUs than a node has take whole nodes."""
    for one in requests:
        count, number = over_nodes(one.demand.count, nodes)
        yield one if number == 1 else replace(one, demand=replace(one.demand, count=count, nodes=number))


def fetched(url: str) -> list[str]:
    """The lines of the file at an address. Raises ValueError for one that is too large."""
    if not url.startswith("https://"):
        raise ValueError(f"{url}: only https is fetched")
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - https alone
        content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{url} is larger than {MAX_BYTES} bytes")
    text: str = content.decode()
    return text.splitlines()
