"""How long does a command take that does nothing: its start, and what it imports?

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

from gpulease import Client, GpuState
from tests.daemon import DaemonProcess, eventually

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


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", "4").start()
        try:
            figures = measured(f"unix://{running.socket}", ROUNDS)
        finally:
            running.stop()
    limit = statistics.median(figures[LIMIT])
    print(f"{'':<26}{'median ms':>10}{'p90 ms':>8}{'least ms':>10}{'of the limit':>14}")
    for name, row in figures.items():
        median, high = statistics.median(row), sorted(row)[int(len(row) * 0.9)]
        print(f"{name:<26}{median:>10.0f}{high:>8.0f}{min(row):>10.0f}{median / limit:>12.1f} x")


if __name__ == "__main__":
    main()
