"""Starts the driver of a pool, see `gpulease_fleet.ray_driver`, and asks it: each answer comes within a bound."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from gpulease_fleet.carrier import EngineUnavailable

FIRST_S, ANSWER_S = 120.0, 45.0
"""How long the first answer of a driver may take, which loads Ray and connects, and each further one."""
ENDED = "Ray has ended the driver of this pool, as it does when the GCS or the raylet of this host is gone"


class RayProcess:
    """A driver in a process of its own. One that has ended, failed or hung is followed by another.

    Args:
        address: As `ray.init(address=...)`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to one of `ray_driver.QUESTIONS`. Raises `EngineUnavailable`."""
        within_s = FIRST_S if self._process is None else ANSWER_S
        try:
            process = self._process = self._process or self._start()
            line = _exchange(process, json.dumps({"ask": what, "arguments": arguments}), within_s)
            answer = json.loads(line)
            if "error" in answer:
                raise EngineUnavailable(answer["error"])
        except EngineUnavailable:
            self.close()
            raise
        return answer["answer"]

    def close(self) -> None:
        """End the driver. Nothing that it has started in the cluster ends with it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "gpulease_fleet.ray_driver", self._address]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the pool
            )
        except OSError as error:
            raise EngineUnavailable(f"no driver can be started: {error.strerror}") from error


def _exchange(process: subprocess.Popen[bytes], question: str, within_s: float) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended, as its answer shows
        process.stdin.write(question.encode() + b"\n")
    answer, until_s = b"", time.monotonic() + within_s
    while not answer.endswith(b"\n"):
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            raise EngineUnavailable(f"it did not answer within {within_s:g} s")
        if not (more := os.read(process.stdout.fileno(), 65536)):
            raise EngineUnavailable(ENDED)
        answer += more
    return answer
