"""How soon is a daemon ready, and how long does a command take that does nothing?

Fresh processes, in turns, so that a busy machine is busy for all of them. The limits beside it: `python -c pass`, which
no program in Python can undercut, and `import click`, the library that reads the command line.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.daemon import InstalledDaemon, installed
from bench.table.rows import Row, Target
from gpulease import Client, GpuState
from tests.daemon import eventually

ROUNDS = 15
PROGRAM = (sys.executable, "-m", "gpulease_cli")
LIMIT = "python -c pass"
COMMANDS: dict[str, Sequence[str]] = {
    LIMIT: (sys.executable, "-c", "pass"),
    'python -c "import click"': (sys.executable, "-c", "import click"),
    "gpulease --help": (*PROGRAM, "--help"),
    "gpulease status": (*PROGRAM, "status"),
    "gpulease run -- true": (*PROGRAM, "run", "--wait", "1m", "--", "true"),
}


def run_ms(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Milliseconds from the start of a process to its end."""
    begun = time.perf_counter()
    # Without a timeout: with one, Python looks for the end in steps of up to 50 ms.
    subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begun) * 1e3


def measured(url: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each command, with a daemon at `url` whose GPUs are free."""
    # As for an installed program: Python keeps what it has compiled.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["GPULEASE_URL"] = url
    figures: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for words in COMMANDS.values():  # once, to compile
        run_ms(words, environment)
    with Client(url) as client:
        for _ in range(rounds):
            eventually(lambda: {gpu.state for gpu in client.gpus()} == {GpuState.FREE}, 60)
            for name, words in COMMANDS.items():
                figures[name].append(run_ms(words, environment))
    return figures


def start_s(directory: Path, rounds: int) -> list[float]:
    """Seconds from the start of `gpulease serve` to its first 200 on /readyz."""
    found = []
    for number in range(rounds):
        running = InstalledDaemon(directory / f"start-{number}", "--simulate", "4")
        begun = time.perf_counter()
        with running.output.open("ab") as output:
            running.process = subprocess.Popen(running.command, stdout=output, stderr=output)
        try:
            while not running.answers("/readyz"):
                assert time.perf_counter() - begun < 60, running.story()
                time.sleep(0.005)
            found.append(time.perf_counter() - begun)
        finally:
            running.stop()
    return found


def startup(quick: bool) -> list[Row]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as place:
        with installed(Path(place), "--simulate", "4") as running:
            figures = measured(f"unix://{running.socket}", 3 if quick else ROUNDS)
        starts = start_s(Path(place), 2 if quick else 7)
    limit = f"`{LIMIT}` {statistics.median(figures[LIMIT]) / 1e3:.3f} s"
    rows = [
        Row(
            question="start of `gpulease serve` to 200 on /readyz, with an empty database",
            formerly="1.74 s",
            target=Target(bound=0.7),
            figure=statistics.median(starts),
            unit="s",
            beside=f"{min(starts):.2f} to {max(starts):.2f} s; {limit}",
        )
    ]
    for name, bound, formerly in (("gpulease status", 0.10, "0.40 s"), ("gpulease run -- true", 0.15, "0.41 s")):
        row = [ms / 1e3 for ms in figures[name]]
        rows.append(
            Row(
                question=f"`{name}`",
                formerly=formerly,
                target=Target(bound=bound),
                figure=statistics.median(row),
                unit="s",
                beside=f"90th percentile {sorted(row)[int(len(row) * 0.9)]:.3f} s; {limit}",
            )
        )
    rows += [
        Row(question=f"`{name}`", figure=statistics.median(figures[name]) / 1e3, unit="s", beside=limit)
        for name in COMMANDS
        if name != LIMIT and name not in ("gpulease status", "gpulease run -- true")
    ]
    return rows
