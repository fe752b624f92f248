"""The scene of the pictures in the documentation: a node of a lab with a week behind it, and a daemon that shows it.

The daemon, what runs and what waits are real; the GPUs are simulated. The week before is written into the database.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, update

from gpulease_server.runtime.gpu_metrics.history import SCALES, Block
from gpulease_server.runtime.gpu_metrics.recorder import encode_series
from gpulease_server.runtime.gpu_metrics.time_series import MEASURES, TimeSeries
from gpulease_server.store import gpu_metrics_table, tables
from gpulease_server.store.gpu_metrics_table import HOURS, MINUTES, QUARTERS, SECONDS, BlockRow
from gpulease_server.store.ledger_store import Store
from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, eventually

GPUS = 8
HOUR_S = 3600
WEEK_S = 7 * 24 * HOUR_S
RUNNING_S = 75 * 60
"""Age of what runs."""
STEP_S = 30
"""Between two readings of the series of a lease in the past."""
GIB = 2**30
TRAINING = """
import itertools, os, time
for step in itertools.count(1):
    print(f"epoch {step // 200} step {step} loss {0.9 - step % 800 / 1000:.4f} 12.4k tokens/s", flush=True)
    time.sleep(1)
"""
FAILING = "raise RuntimeError('loss is nan after 212 steps')"
AGES_MIN = {
    "tokenize": 99, "vit-huge": 93, "ablation": 79, "llama8b-pretrain": 75, "sdxl-lora": 62, "notebook": 58,
    "mistral-ft": 33, "big-batch": 21, "eval-sweep": 8, "vae": 4,
}  # fmt: skip
"""When each ended, began to run or began to wait, in the order in which they are asked for."""
LASTED_MIN = {"tokenize": 5, "vit-huge": 5, "ablation": 13}
OWNERS = {
    "tokenize": "dai", "vit-huge": "chloe", "ablation": "eve", "llama8b-pretrain": "ada", "sdxl-lora": "bram",
    "notebook": "chloe", "mistral-ft": "ada", "big-batch": "chloe", "eval-sweep": "dai", "vae": "bram",
}  # fmt: skip
BANDS = (
    ("gpu.unhealthy", "gpu.recovered", 7, 80, 68, "xid:79"),
    ("gpu.cordoned", "gpu.uncordoned", 6, 130, 119, "by root: new riser"),
)
"""The events that begin and end it, the GPU, from and to how many hours ago, and why."""


@dataclass(frozen=True)
class Work:
    """What someone did with GPUs: who, what for, on which, from when to when, and how busy they were."""

    user: str
    label: str
    gpus: tuple[int, ...]
    from_s: float
    to_s: float
    level: float
    end_reason: str = "released"
    wait_s: float = 20

    def ratio(self, gpu: int, at_s: float) -> float:
        """Utilization of one of its GPUs."""
        noise = (math.sin(at_s / 37 + gpu) + math.sin(at_s * 1.7 + 3 * gpu)) / 2
        if self.label == "llama8b-pretrain":
            stalls = at_s % 97 < 7
            return 0.08 + 0.02 * noise if stalls else (0.66 if gpu == 3 else 0.95) + 0.03 * noise
        if self.label == "notebook":
            return 0.0 if at_s - self.from_s > 900 else self.level
        if self.level < 0.6:
            return max(0.0, min(1.0, self.level + self.level * math.sin(at_s / 611) + 0.05 * noise))
        return min(1.0, self.level + 0.03 * noise)


def past(now_s: float) -> list[Work]:
    """A week of five people: large trainings on four GPUs, smaller ones on the others, and some that wait or fail."""
    chance = random.Random(21)
    big = [("ada", "llama8b-pretrain"), ("dai", "mistral-ft"), ("chloe", "vit-huge")]
    small = [("bram", "sdxl-lora"), ("chloe", "eval"), ("dai", "sweep"), ("eve", "notebook"), ("bram", "vae")]
    until_s, found = now_s - 105 * 60, []
    for gpus, kinds, hours in (
        ((0, 1, 2, 3), big, (5, 19)),
        ((4, 5), small, (2, 9)),
        ((6,), small, (1, 7)),
        ((7,), small, (1, 6)),
    ):
        at_s = now_s - WEEK_S - chance.uniform(0, 5) * HOUR_S
        while at_s < until_s:
            user, label = chance.choice(kinds)
            end_s = min(until_s, at_s + chance.uniform(*hours) * HOUR_S)
            level = 0.35 if label in ("eval", "notebook") else chance.uniform(0.7, 0.95)
            reason = chance.choice(["job_finished"] * 5 + ["released"] * 3 + ["revoked", "holder_died"])
            wait_s = chance.choice([5, 30, 900, 3 * HOUR_S])
            band = next((one for one in BANDS if one[2] in gpus), None)
            if band and at_s < now_s - band[4] * HOUR_S and end_s > now_s - band[3] * HOUR_S:
                at_s = now_s - band[4] * HOUR_S
                continue
            found.append(Work(user, label, gpus, at_s, end_s, level, reason, wait_s))
            at_s = end_s + chance.choice([60, 300, 1800, 3 * HOUR_S])
    return found


def present(now_s: float) -> list[Work]:
    """What holds GPUs now. GPU 6 is used without a lease."""
    begun_s = now_s - RUNNING_S
    return [
        Work("ada", "llama8b-pretrain", (0, 1, 2, 3), begun_s, now_s, 0.95),
        Work("bram", "sdxl-lora", (4,), now_s - 60 * AGES_MIN["sdxl-lora"], now_s, 0.5),
        Work("chloe", "notebook", (5,), now_s - 60 * AGES_MIN["notebook"], now_s, 0.4),
    ]


def readings(ratio: float, memory_gib: float) -> dict[str, Any]:
    """What a driver shows of a GPU that is so busy."""
    return {
        "utilization_ratio": round(ratio, 3),
        "memory_used_bytes": int(memory_gib * GIB),
        "power_w": round(74 + 600 * ratio),
        "temperature_c": round(31 + 38 * ratio),
    }


def memory_of(work: Work) -> float:
    """In GiB."""
    return 18.2 if work.label == "notebook" else 71.3 if len(work.gpus) > 1 else 41.5


class Scene:
    """The daemon and its hardware."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hardware = Hardware(directory / "hardware.json")
        self.running = DaemonProcess(
            directory / "d", "--simulate", str(self.hardware.path), "--node", "gpubox", "--fair-share"
        )
        self.ids: dict[str, str] = {}
        """Of leases and jobs, by label."""

    def show(self) -> None:
        """Move the hardware on to this second."""
        now_s = time.time()
        by_gpu = {gpu: work for work in present(now_s) for gpu in work.gpus}
        shown = []
        for gpu in range(GPUS):
            work = by_gpu.get(gpu)
            if work is not None:
                processes = 1 + len(work.gpus) if len(work.gpus) > 1 else 1  # of 1 GiB, which the simulation adds
                shown.append(readings(work.ratio(gpu, now_s), memory_of(work) - processes))
            elif gpu == 6:
                process = {"pid": 4_021_742, "memory_bytes": 33 * GIB, "user": "eve", "command": "python try_it.py"}
                shown.append({**readings(0.62 + 0.05 * math.sin(now_s), 33.0), "processes": [process]})
            else:
                shown.append(readings(0, 0))
        self.hardware.show(*shown, links=[[0, 1, "nvlink"], [1, 2, "nvlink"], [2, 3, "nvlink"], [4, 5, "nvlink"]])

    def ask(self, label: str, **body: Any) -> None:
        """A lease or a request that waits."""
        answer = self.running.call("POST", "/v1/leases", {"label": label, "ttl_s": 36_000, **body})
        assert answer.status in (201, 202), answer.content
        self.ids[label] = answer.json["id"]

    def begin(self) -> None:
        """Let real jobs, leases and requests begin, and write the past behind them."""
        self.hardware.show(*[{} for _ in range(GPUS)])
        self.running.start()
        (self.directory / "train.py").write_text(TRAINING)
        (self.directory / "vit.py").write_text(FAILING)
        place = {"working_directory": str(self.directory)}
        for command, name, state in (
            (("true",), "tokenize", "succeeded"),
            (("python3", "vit.py"), "vit-huge", "failed"),
            (("sleep", "600"), "ablation", "running"),
        ):
            self.ids[name] = self.running.submit(*command, name=name, gpus=4, **place)
            self.running.wait_job(self.ids[name], state)
        self.running.call("POST", f"/v1/jobs/{self.ids['ablation']}/cancel", {"grace_s": 0})
        self.running.wait_free()
        training = ("--epochs", "40", "--config", "configs/llama8b_fsdp.yaml")
        job = self.running.submit(
            "train.py",
            *training,
            name="llama8b-pretrain",
            gpus=4,
            launcher="torchrun",
            environment={"OMP_NUM_THREADS": "8"},
            **place,
        )
        self.ids["job"] = job
        self.running.wait_job(job, "running")
        self.show()
        eventually(lambda: self.running.gpu_states()[6] == "foreign", 60, self.running.story)
        for gpu, label in ((4, "sdxl-lora"), (5, "notebook")):
            others = [self.hardware.uuid(other) for other in (4, 5, 7) if other != gpu]
            for other in others:
                self.running.call("POST", f"/v1/gpus/{other}/cordon")
            self.ids[label] = self.running.submit("sleep", "86400", name=label, **place)
            self.running.wait_job(self.ids[label], "running")
            assert self.running.job(self.ids[label])["gpus"][0]["index"] == gpu
            for other in others:
                self.running.call("POST", f"/v1/gpus/{other}/uncordon")
        self.ask("mistral-ft", count=4)
        self.ask("big-batch", count=8)
        self.ask("eval-sweep", count=2, priority="interactive", time_s=HOUR_S)
        self.ask("vae", count=2, priority="scavenge")
        for key, limits in (
            ("user/ada", {"max_gpus": 8, "max_lease_s": 24 * HOUR_S}),
            ("user/bram", {"max_gpus": 4, "gpu_hours": 200}),
            ("group/vision", {"max_gpus": 3, "gpu_hours": 500, "members": ["bram", "chloe"]}),
        ):
            assert self.running.call("PUT", f"/v1/limits/{key}", limits).status == 200
        self.running.stop()
        self._write_the_past()
        self.running.start()

    def _write_the_past(self) -> None:
        now_s = time.time()
        store = Store(f"sqlite:///{self.running.data_dir}/gpulease.db")
        with store.writing() as connection:
            self._age(connection)
            series = self._past_leases(connection, past(now_s))
        for work in present(now_s):
            series[self._lease_of(store, work.label)] = series_of(work, self.hardware)
        gpu_metrics_table.save(store, series)
        gpu_metrics_table.save_blocks(store, list(blocks(now_s, self.hardware)))
        store.close()

    def _lease_of(self, store: Store, label: str) -> str:
        job = tables.job
        query = select(job.c.lease_id).where(job.c.name == label, job.c.state == "running")
        with store.engine.connect() as connection:
            return str(connection.scalar(query))

    def _age(self, connection: Connection) -> None:
        """Let what runs have begun earlier, and give it to its users."""
        ages = {}
        for table, begins, name in (
            (tables.lease, "granted_at", lambda row: str(row.holder["label"])),
            (tables.job, "started_at", lambda row: row.name),
        ):
            for row in connection.execute(select(table)).all():
                label = name(row)
                age = timedelta(minutes=AGES_MIN[label])
                changes = {at: getattr(row, at) and getattr(row, at) - age for at in ("created_at", begins, "ended_at")}
                for at in ("created_at", begins):
                    changes[at] = changes[at] and changes[at] - timedelta(minutes=LASTED_MIN.get(label, 0))
                is_lease = table is tables.lease
                owner = {"holder": {**row.holder, "user": OWNERS[label]}} if is_lease else {"user_name": OWNERS[label]}
                connection.execute(update(table).where(table.c.id == row.id).values({**changes, **owner}))
                ages[row.id] = age
        age = timedelta(minutes=min(AGES_MIN.values()))
        now = datetime.now(UTC)
        for row in connection.execute(select(tables.event).order_by(tables.event.c.seq.desc())).all():
            age = ages.get(row.job_id or row.lease_id) or age
            connection.execute(
                update(tables.event).where(tables.event.c.seq == row.seq).values(seq=row.seq + 1000, at=row.at - age)
            )
        past: list[tuple[str, list[int], float, str | None]] = [("node.ready", [], 2 * WEEK_S / HOUR_S, None)]
        for begin, end, gpu, from_h, to_h, reason in BANDS:
            past += [(begin, [gpu], from_h, reason), (end, [gpu], to_h, reason)]
        for seq, (kind, gpus, hours, why) in enumerate(past, start=1):
            event = {
                "seq": seq,
                "at": now - timedelta(hours=hours),
                "kind": kind,
                "cause": f"past-{seq}",
                "node": "gpubox",
                "reason": why,
            }
            connection.execute(insert(tables.event).values({**event, "gpus": [self.hardware.uuid(at) for at in gpus]}))

    def _past_leases(self, connection: Connection, works: list[Work]) -> dict[str, bytes]:
        """Write leases that have ended; their series."""
        like = connection.execute(select(tables.lease).where(tables.lease.c.state == "active")).first()
        assert like is not None
        devices = {row.uuid: {**row.device, "uuid": row.uuid} for row in connection.execute(select(tables.gpu)).all()}
        series = {}
        for number, work in enumerate(works, start=1):
            lease_id = f"lease-{number:016x}"
            created, granted, ended = (
                datetime.fromtimestamp(at, UTC) for at in (work.from_s - work.wait_s, work.from_s, work.to_s)
            )
            connection.execute(
                insert(tables.lease).values(
                    {
                        **like._mapping,
                        "id": lease_id, "number": -number, "token": None, "port": None, "job_id": None,
                        "state": "ended", "end_reason": work.end_reason,
                        "holder": {**like.holder, "user": work.user, "label": work.label},
                        "gpus": [devices[self.hardware.uuid(gpu)] for gpu in work.gpus],
                        "created_at": created, "granted_at": granted, "renewed_at": granted, "ended_at": ended,
                    }
                )
            )  # fmt: skip
            series[lease_id] = series_of(work, self.hardware)
        return series


def series_of(work: Work, hardware: Hardware) -> bytes:
    """What was recorded of a lease."""
    found = {hardware.uuid(gpu): TimeSeries.empty() for gpu in work.gpus}
    length_s = work.to_s - work.from_s
    step_s = 1 if length_s <= 2 * HOUR_S else STEP_S
    for gpu in work.gpus:
        for number in range(int(length_s / step_s)):
            shown = readings(work.ratio(gpu, work.from_s + number * step_s), memory_of(work))
            found[hardware.uuid(gpu)].add((number + 1) * step_s, step_s, [shown[name] for name in MEASURES])
    return encode_series(found)


def blocks(now_s: float, hardware: Hardware) -> Iterator[BlockRow]:
    """What was recorded of every GPU in the last week."""
    works = past(now_s) + present(now_s)
    for gpu in range(GPUS):
        own = [work for work in works if gpu in work.gpus]
        for resolution, keep_s in ((SECONDS, HOUR_S), (MINUTES, 24 * HOUR_S), (QUARTERS, WEEK_S), (HOURS, WEEK_S)):
            start_s = int(now_s - keep_s)
            for block_s in range(start_s - start_s % resolution.block_s, int(now_s), resolution.block_s):
                block = Block(resolution, block_s)
                for bucket in range(resolution.buckets):
                    at_s = block_s + bucket * resolution.width_s
                    if at_s + resolution.width_s > now_s:
                        break
                    work = next((one for one in own if one.from_s <= at_s < one.to_s), None)
                    ratio = work.ratio(gpu, at_s) if work else 0.62 if gpu == 6 and now_s - at_s < RUNNING_S else 0.0
                    shown = readings(ratio, memory_of(work) if work else 0)
                    fill(block, bucket, shown)
                yield BlockRow(hardware.uuid(gpu), resolution.width_s, block_s, block.to_bytes())


def fill(block: Block, bucket: int, shown: dict[str, float]) -> None:
    """Write what was shown into a bucket."""
    width_s = block.resolution.width_s
    for measure, (name, scale) in enumerate(zip(MEASURES, SCALES, strict=True)):
        value = round(shown[name] * scale)
        if block.resolution is SECONDS:
            block.cells[measure * block.resolution.buckets + bucket] = value
        else:
            block.put(bucket, measure, width_s, value * width_s, value)


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """The scene, ended with all that runs in it."""
    found = Scene(directory)
    try:
        found.begin()
        yield found
    finally:
        if found.running.is_running():
            found.running.end_everything()
        found.running.stop()
