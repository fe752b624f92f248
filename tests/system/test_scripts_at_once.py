"""64 scripts start at once, each wants two of eight GPUs; beside them the same with a model of Lightning's rule.

Lightning's rule (2.6, `find_usable_cuda_devices`): go through the GPUs in order, and take each on which a tensor can be
allocated. In compute mode DEFAULT that is every GPU, even one in use; in EXCLUSIVE_PROCESS one that no other process
has a context on, and the tensor itself makes that context. No one waits: too few is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from tests.daemon import daemon

pytestmark = [pytest.mark.slow, pytest.mark.busy]

SCRIPTS, GPUS, WANTED, HOLD_S = 64, 8, 2, 0.1

OURS = """
import json, sys, time, gpulease
found = gpulease.find_usable_cuda_devices(2, wait_s=200)
begun = time.monotonic()
time.sleep(float(sys.argv[1]))
print(json.dumps([found, begun, time.monotonic()]))
"""

LIGHTNINGS = """
import json, os, sys, time
from pathlib import Path
contexts, exclusive = Path(sys.argv[2]), sys.argv[3] == "exclusive_process"
found = []
for gpu in range(8):
    try:
        os.close(os.open(contexts / (f"{gpu}" if exclusive else f"{gpu}-{os.getpid()}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        continue
    found.append(gpu)
    if len(found) == 2:
        break
begun = time.monotonic()
enough = len(found) == 2
time.sleep(float(sys.argv[1]) if enough else 0)
ended = time.monotonic()
for gpu in found:
    (contexts / (f"{gpu}" if exclusive else f"{gpu}-{os.getpid()}")).unlink()
print(json.dumps([found if enough else [], begun, ended]))
"""


@dataclass(frozen=True)
class Hold:
    """What one script used, by its own clock: the machine's monotonic one, which all processes share."""

    gpus: frozenset[int]
    begun_s: float
    ended_s: float

    def collides(self, other: Hold) -> bool:
        return bool(self.gpus & other.gpus) and self.begun_s < other.ended_s and other.begun_s < self.ended_s


def storm(script: str, *arguments: str, **environment: str) -> list[Hold]:
    """What each script held; nothing for one that was refused. All are started before the first is waited for."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "CUDA_"))}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(HOLD_S), *arguments],
            env=clean | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(SCRIPTS)
    ]
    holds = []
    try:
        for process in running:
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 0
            found, begun_s, ended_s = json.loads(said)
            holds.append(Hold(frozenset(found), begun_s, ended_s))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return holds


def collisions(holds: list[Hold]) -> int:
    """Pairs of scripts that used one GPU at the same time."""
    return sum(first.collides(second) for first, second in combinations(holds, 2))


@pytest.mark.timeout(400)
def test_64_scripts_at_once_are_all_served_and_never_meet_where_lightnings_rule_has_them_collide(
    tmp_path: Path, record_property
) -> None:
    with daemon(tmp_path, "--simulate", str(GPUS)) as running:
        begun_s = time.monotonic()
        ours = storm(OURS, GPULEASE_URL=running.url)
        took_s = time.monotonic() - begun_s
    theirs = {}
    for mode in ("default", "exclusive_process"):
        contexts = tmp_path / mode
        contexts.mkdir()
        theirs[mode] = storm(LIGHTNINGS, str(contexts), mode)
    refused = [sum(not hold.gpus for hold in holds) for holds in theirs.values()]
    figures = (
        f"gpulease: {collisions(ours)} collisions, {sum(not hold.gpus for hold in ours)} refused, {took_s:.1f} s;"
        f" Lightning's rule in mode default: {collisions(theirs['default'])} collisions, {refused[0]} refused;"
        f" in exclusive_process: {collisions(theirs['exclusive_process'])} collisions, {refused[1]} refused"
    )
    record_property("figures", figures)
    print(figures)
    assert all(len(hold.gpus) == WANTED for hold in ours), figures
    assert collisions(ours) == 0, figures
    assert collisions(theirs["default"]) > 0, figures
