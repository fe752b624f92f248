"""The steps of a walk, typed by users of one host."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.attack.host import PATIENCE_S, Host, Program
from tests.daemon import eventually

TERMINAL = "stty cols 80 rows 24; "
"""Before a command on a terminal of the size that most have."""


class Walk:
    """Types commands as users of a host, and keeps a transcript with what was printed before beside it."""

    def __init__(self, host: Host, write: Callable[[str], object]) -> None:
        self.host = host
        self.failures: list[str] = []
        self._write_line = write

    def part(self, part: Callable[[Walk], None]) -> None:
        """Walk one part; the next begins even where this one fails."""
        try:
            part(self)
        except AssertionError as error:
            self.failures.append(str(error))

    def step(
        self,
        item: str,
        user: str,
        command: str,
        *,
        before: str = "",
        now: Sequence[str] = (),
        never: Sequence[str] = (),
        code: int | None = 0,
        terminal: bool = False,
        **environment: str,
    ) -> str:
        """Type a command in the user's home and return what it prints, on stdout and stderr.

        It has failed unless every pattern of `now` is found in it, none of `never` is, and its exit code is `code`.
        """
        exit_code, printed = self.host.completed(
            user, *self._shell(command, terminal), **self._login(user, environment)
        )
        printed = printed.replace("\r\n", "\n")
        self._write(item, user, command, before, f"now (exit {exit_code})", printed)
        self._check(item, printed, now, never)
        if code is not None and exit_code != code:
            self.failures.append(f"{item}: exit code {exit_code} instead of {code}\n{printed}")
        return printed

    @contextmanager
    def beside(self, user: str, command: str, *, terminal: bool = False, **environment: str) -> Iterator[Program]:
        """A command that goes on while the block is walked."""
        words = self._shell(command, terminal)
        with self.host.running(user, *words, **self._login(user, environment)) as program:
            self._write_line(f"$ ({user}, in another terminal) {command}\n\n")
            yield program

    def until(self, user: str, command: str, pattern: str) -> None:
        """Repeat a command until this is in what it prints."""
        words = self._shell(command, False)

        def printed() -> str:
            return self.host.completed(user, *words, **self._login(user, {}))[1]

        eventually(lambda: re.search(pattern, printed()), PATIENCE_S, printed)

    def saw(self, item: str, user: str, what: str, before: str, printed: str, now: Sequence[str]) -> None:
        """Record what a program printed that ran beside the walk, and check it."""
        self._write(item, user, what, before, "now", printed)
        self._check(item, printed, now, ())

    def file(self, user: str, name: str, text: str, mode: int = 0o644) -> None:
        """Write a file in the user's home."""
        path = self.host.home(user) / name
        path.write_text(textwrap.dedent(text).lstrip())
        path.chmod(mode)

    def _write(self, item: str, user: str, command: str, before: str, heading: str, printed: str) -> None:
        lines = [f"## {item}", f"$ ({user}) {command}"]
        if before:
            lines += ["before:", textwrap.indent(textwrap.dedent(before).strip(), "    ")]
        lines += [f"{heading}:", textwrap.indent(printed.strip() or "(nothing)", "    "), ""]
        self._write_line("\n".join(lines) + "\n")

    def _shell(self, command: str, terminal: bool) -> list[str]:
        if terminal:
            return ["script", "-qec", f"bash -c {shlex.quote(TERMINAL + command)}", "/dev/null"]
        return ["bash", "-c", f"cd ~; {command}"]

    def _login(self, user: str, environment: dict[str, str]) -> dict[str, str]:
        path = f"{Path(self.host.directory) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "SHELL": "/bin/bash", "TERM": "xterm"} | environment

    def _check(self, item: str, printed: str, now: Sequence[str], never: Sequence[str]) -> None:
        self.failures += [f"{item}: no {pattern!r} in\n{printed}" for pattern in now if not re.search(pattern, printed)]
        self.failures += [f"{item}: {pattern!r} in\n{printed}" for pattern in never if re.search(pattern, printed)]
