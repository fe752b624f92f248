"""Ray: tasks of one GPU each on a local cluster with eight.

As it comes, Ray starts a new process for each task with a GPU, so that its memory is free again. `max_calls=0` reuses
processes. Ray is in `.venv/tools` after `make tools`; `GPULEASE_BENCH_RAY` names the Python of another installation.

`ray_program.py` runs in that Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.peers import NotInstalled

START_S, TASKS_S = 60, 60


def rate(tasks: int, *, reuse: bool) -> float:
    """Tasks of `true` per second. Raises NotInstalled."""
    with tempfile.TemporaryDirectory(prefix="r") as place:  # a short path: Ray has Unix sockets in it
        environment = {**os.environ, "HOME": place, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        command = [
            str(interpreter()),
            str(Path(__file__).with_name("ray_program.py")),
            str(tasks),
            "reuse" if reuse else "new",
            place,
        ]
        try:
            ran = subprocess.run(
                command, env=environment, cwd=place, capture_output=True, text=True, timeout=START_S + TASKS_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotInstalled("its tasks do not come back") from None
        if ran.returncode != 0:
            raise NotInstalled(
                f"does not run here: {(ran.stderr.strip().splitlines() or ['it said nothing'])[-1]:.200}"
            )
        return tasks / float(ran.stdout.splitlines()[-1])


def interpreter() -> Path:
    """A Python that has Ray. Raises NotInstalled."""
    named = os.environ.get("GPULEASE_BENCH_RAY")
    for python in (Path(named) if named else None, Path(sys.prefix) / "tools" / "bin" / "python"):
        if python is not None and python.exists():
            return python
    raise NotInstalled("not installed: make tools")
