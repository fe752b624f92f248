"""What a user of a cluster types, against a daemon without nodes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from gpulease_fleet.pool import describe
from gpulease_fleet.records import Records
from tests.daemon import DaemonProcess


class Fleet:
    """A daemon without nodes, and what a user of the cluster types."""

    worker_options = ("--simulate=8", "--allocation-poll-s=0.5", "--poll-s=0.2")

    def __init__(self, running: DaemonProcess, place: Path, variables: Mapping[str, str], *options: str) -> None:
        self.running, self.place, self._options = running, place, options
        self.variables = dict(variables) | {"GPULEASE_FLEET_DIR": str(place / "fleet")}
        self.engine, self.python = "slurm", sys.executable

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        return self.running.gpulease("fleet", self.engine, *words, **self.variables)

    @property
    def options(self) -> tuple[str, ...]:
        return (
            *("--tick", "1s", "--leave", "20s", *self._options),
            *("--program", f"{Path(sys.executable).parent}/gpulease", "--worker-dir", str(self.place / "workers")),
            *(f"--worker-option={option}" for option in self.worker_options),
        )

    @contextmanager
    def up(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """`up`, for as long as the block lasts; its pilots go on."""
        command = [self.python, "-m", "gpulease_cli", "fleet", self.engine, "up", *self.options, *words]
        environment = os.environ | {"HOME": str(self.place), "GPULEASE_URL": self.running.url} | self.variables
        log = (self.place / "fleet.log").open("a")
        process = subprocess.Popen(command, env=environment, text=True, stdout=log, stderr=log)
        log.close()
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def nodes(self) -> dict[str, dict[str, object]]:
        return {node["name"]: node for node in self.running.call("GET", "/v1/nodes").json["items"]}

    def ready(self) -> list[str]:
        return [name for name, node in self.nodes().items() if node["state"] == "ready"]

    def pilots(self) -> list[dict[str, object]]:
        with closing(Records(self.place / "fleet", "main")) as records:
            pool, rows = records.read_pool(), records.pilots()
        found: list[dict[str, object]] = [] if pool is None else describe(pool, rows)["pilots"]
        return found

    def submitted_at(self, ordinal: int) -> float:
        """When the last pilot of an ordinal was submitted. Seconds since the epoch."""
        with closing(Records(self.place / "fleet", "main")) as records:
            return next(row.since for row in records.pilots() if row.ordinal == ordinal)

    def story(self) -> str:
        """What the pool and its pilots printed."""
        logs = [self.place / "fleet.log", *sorted((self.place / "workers").glob("pilot-*.log"))[-3:]]
        told = (f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists())
        return "\n".join([self.type("status").stdout, *told, self.running.story()])
