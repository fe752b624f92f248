"""The help of a program with many commands: by subject, with each command's whole first sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

HELP = ("-h", "--help")
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Use GPUs now": ("run", "acquire", "renew", "release"),
    "Trainings in the queue": ("submit", "jobs", "logs", "metrics", "wait", "cancel"),
    "Who has what, and why": ("status", "leases", "explain", "events"),
    "The daemon and its host": ("serve", "worker", "doctor", "db", "config"),
    "Out of use, and back": ("node", "gpu"),
    "Who may ask": ("token",),
}
"""Commands of the program by what one wants to do. One that is not named here is shown last, under `More`."""


class BySubject(TyperGroup):
    """A group whose help lists its commands under `SUBJECTS`, or under one head if none of them is named there."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        for head, names in self._sections(ctx):
            rows = [(name, _sentence(self.commands[name])) for name in names]
            with formatter.section(head):
                formatter.write_dl(rows)

    def _sections(self, ctx: typer.Context) -> Iterator[tuple[str, list[str]]]:
        shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        left = list(shown)
        for head, names in SUBJECTS.items():
            if ctx.parent is None and (here := [name for name in names if name in shown]):
                left = [name for name in left if name not in here]
                yield head, here
        if left:
            yield ("Commands" if left == shown else "More"), left


def _sentence(command: Any) -> str:
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return text.split(". ")[0].split(": ")[0].rstrip(".")
