"""The script of a pilot: it ends when it is told to, also while no worker runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpulease_fleet.worker_script import worker_script

WORKER = """#!/bin/sh
echo started
test -e {place}/again && exec sleep 600
touch {place}/again
exit 3
"""
"""A worker that ends at once when it is first started, and then stays."""
TOLD = """#!/bin/sh
echo >> {place}/calls
test $(wc -l < {place}/calls) = {call} && kill -TERM $PPID
exec /bin/{name} "$@"
"""
"""A program that the script calls, the n-th time between two workers: by that call it is told to end."""


@pytest.mark.parametrize(
    ("name", "call", "starts", "code"),
    [("sleep", 1, 1, 3), ("date", 3, 2, 128 + 15)],
    ids=["it waits", "it is about to start the next"],
)
def test_one_that_is_told_to_end_between_two_workers_ends(
    tmp_path: Path, name: str, call: int, starts: int, code: int
) -> None:
    (tmp_path / "gpulease").write_text(WORKER.format(place=tmp_path))
    (tmp_path / name).write_text(TOLD.format(place=tmp_path, name=name, call=call))
    for program in ("gpulease", name):
        (tmp_path / program).chmod(0o755)
    script = worker_script(
        program=str(tmp_path / "gpulease"),
        url="http://127.0.0.1:9",
        token="t",
        directory=str(tmp_path),
        node="n",
        allocation="none",
        leave_s=1.0,
        options=(),
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ran.returncode == code
    assert ran.stdout.split("\n")[1].startswith("the worker has ended with 3")
    assert ran.stdout.count("started\n") <= starts
