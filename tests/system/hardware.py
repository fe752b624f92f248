"""Simulated hardware that a test changes while a daemon runs, and that remembers what it showed when."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
BAD: tuple[dict[str, Any], ...] = (
    {"processes": [{"pid": 3999999, "memory_bytes": GIB}]},
    {"processes": [{"pid": 3999998, "type": "mps"}]},
    {"health": "lost"},
    {"health": "reset_required"},
    {"health": "xid:79"},
    {"compute_mode": "prohibited"},
)
"""What makes a GPU one that must not be granted."""
HANGS_S = 60.0


@dataclass(frozen=True)
class Version:
    """One content of the file: valid from some moment between `before_s` and `after_s`, monotonic, on."""

    before_s: float
    after_s: float
    grantable: frozenset[str]
    """UUIDs of the GPUs that this content shows fit to be granted."""


class Hardware:
    """The file that `--simulate` names. Every change is one atomic rename; safe to change from several threads."""

    def __init__(self, path: Path, gpus: int) -> None:
        self.path = path
        self.wrong: dict[int, dict[str, Any]] = {}
        """By index, what is wrong with a GPU."""
        self.retained: set[int] = set()
        """GPUs on which someone left memory behind."""
        self.hang_s = 0.0
        self.broken = False
        self.versions: list[Version] = []
        self.uuids = [f"GPU-0000000{index}-0000-0000-0000-000000000000" for index in range(gpus)]
        self.lock = threading.RLock()
        self.show()

    def show(self) -> float:
        """Put what is now to be seen into the file; when that was, monotonic."""
        with self.lock:
            gpus = [
                {"uuid": uuid, "memory_used_bytes": 20 * GIB * (index in self.retained), **self.wrong.get(index, {})}
                for index, uuid in enumerate(self.uuids)
            ]
            text = "{" if self.broken else json.dumps({"gpus": gpus, "hang_s": self.hang_s})
            replacement = self.path.with_suffix(".new")
            replacement.write_text(text)
            readable = not self.broken and self.hang_s < HANGS_S
            fit = {uuid for index, uuid in enumerate(self.uuids) if index not in self.wrong.keys() | self.retained}
            before_s = time.monotonic()
            replacement.replace(self.path)
            self.versions.append(Version(before_s, time.monotonic(), frozenset(fit if readable else ())))
            return self.versions[-1].after_s

    def set_wrong(self, wrong: dict[int, dict[str, Any]]) -> None:
        """Say of all GPUs at once what is wrong with them, on a driver that answers."""
        with self.lock:
            self.wrong, self.hang_s, self.broken = dict(wrong), 0.0, False
            self.show()

    def leave_memory(self, index: int, left: bool) -> None:
        """Memory of a process that is gone stays on a GPU, or goes."""
        with self.lock:
            (self.retained.add if left else self.retained.discard)(index)
            self.show()

    def change(self, chance: random.Random) -> None:
        """Change one thing: mostly a GPU, now and then the whole driver."""
        with self.lock:
            self.hang_s, self.broken = 0.0, False
            what = chance.random()
            if what < 0.02:
                self.broken = True
            elif what < 0.06:
                self.hang_s = 0.3
            else:
                index = chance.randrange(len(self.uuids))
                if self.wrong.pop(index, None) is None:
                    self.wrong[index] = chance.choice(BAD)
            self.show()

    def showed_fit(self, gpus: set[str], since_s: float, until_s: float) -> bool:
        """True when some content that was valid within this time showed all of these GPUs fit to be granted."""
        ends_s = [version.after_s for version in self.versions[1:]] + [float("inf")]
        return any(
            version.before_s <= until_s and end_s >= since_s and gpus <= version.grantable
            for version, end_s in zip(self.versions, ends_s, strict=True)
        )
