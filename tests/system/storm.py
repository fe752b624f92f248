"""Many processes at once, each asking for GPUs, holding them, giving them back, and writing down what it was told.

Run as `python -m tests.system.storm URL PROCESSES COUNT HOLD_S DIRECTORY [PROGRAM ARGUMENT...]`. Each process appends
lines of JSON to a file of its own in DIRECTORY; a line is written only after the daemon's answer has arrived. With a
program, each runs it under its lease until it prints a line, and kills it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import httpx2  # noqa: F401 - once, before the processes are forked

from gpulease import Client
from gpulease_protocol.errors import DaemonUnavailable, Unavailable

WAIT_S = 360.0
RETRY_S = 180.0
"""How long clients retry during an outage. A storm slows down starts, and kills come one after the other: a process
that gives a
request up during an outage cannot take it back, and waits behind it, because it lives as long as the process does."""


def one(url: str, count: int, hold_s: float, log: TextIO, program: list[str]) -> None:
    """Ask, hold, release."""

    def say(**what: object) -> None:
        log.write(json.dumps({"at_s": time.monotonic(), **what}) + "\n")
        log.flush()

    until_s = time.monotonic() + WAIT_S
    with Client(url, retry_s=RETRY_S) as client:
        while True:
            try:
                lease = client.lease(count=count, wait_s=until_s - time.monotonic(), ttl_s=30)
                break
            except (DaemonUnavailable, Unavailable):
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)
        say(got=lease.id, token=lease.fencing_token, gpus=[gpu.uuid for gpu in lease.gpus])
        if program:
            with subprocess.Popen(program, env=lease.environ(), stdout=subprocess.PIPE) as training:
                assert training.stdout is not None
                assert training.stdout.readline().startswith(b"ready ")
                training.kill()
        time.sleep(hold_s)
        say(releasing=lease.id)
        while True:
            try:
                lease.release()
                break
            except (DaemonUnavailable, Unavailable):  # a further call tries again
                if time.monotonic() > until_s:
                    raise
        say(released=lease.id, token=lease.fencing_token)


def main() -> int:
    """Fork the processes, let them go at the same moment, and count those that failed."""
    url, processes, count, hold_s, directory, *program = sys.argv[1:]
    # No one reads standard error before the end: what announces waits would fill the pipe and hold the processes up.
    logging.getLogger("gpulease").setLevel(logging.ERROR)
    gate, opened = os.pipe()
    children = []
    for number in range(int(processes)):
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            os.read(gate, 1)
            code = 1
            try:
                with (Path(directory) / f"{number}.jsonl").open("w") as log:
                    one(url, int(count), float(hold_s), log, program)
                code = 0
            except BaseException as error:
                print(f"process {number}: {error!r}", file=sys.stderr, flush=True)
            os._exit(code)
        children.append(pid)
    os.close(gate)
    os.close(opened)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in children)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
