"""Starts `gpulease` from a process that has imported it already, which saves 2 s of CPU time for each daemon.

The fast lane starts a few hundred daemons and as many commands, and imports are most of what a start costs. Each is
still a process of its own, forked by the fork server of `multiprocessing`. The worker that a daemon starts is executed
as always, and so is the program itself on a terminal, in the documents and in the demo.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "alembic.command",
        "gpulease_cli.program",
        "gpulease_server.commands.serve",
        "gpulease_server.main",
        "gpulease_server.serving",
        "sqlalchemy.dialects.sqlite",
        "uvicorn.lifespan.on",
        "uvicorn.loops.auto",
        "uvicorn.protocols.http.auto",
    ]
)


class ForkedProgram:
    """The part of `subprocess.Popen` that tests use, for a program that was forked."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        *,
        target: Callable[..., None] | None = None,
    ) -> None:
        """`target`: what runs in place of `run`, with its arguments."""
        files = (str(output), str(errors or output))
        self._process: ForkServerProcess = CONTEXT.Process(
            target=target or run, args=(list(arguments), dict(environment), files, os.getcwd()), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("gpulease", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.kill()


def completed(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `gpulease ARGUMENTS` to its end, as `subprocess.run` would. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory) / "stdout", Path(directory) / "stderr"
        program = ForkedProgram(arguments, environment, output, errors)
        try:
            code = program.wait(timeout_s)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        return subprocess.CompletedProcess(["gpulease", *arguments], code, output.read_text(), errors.read_text())


def run(arguments: list[str], environment: dict[str, str], files: tuple[str, str], directory: str) -> None:
    """In the new process: what `gpulease ARGUMENTS` does with this environment, output and directory."""
    for number, path in enumerate(files, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["gpulease", *arguments]
    from gpulease_cli import main  # noqa: PLC0415 - imported in the fork server

    sys.exit(main(arguments))
