"""The form of `--help`: the program's commands by subject, a command's options under headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

HELP_OPTIONS = ("-h", "--help")
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Use GPUs now": ("run", "acquire", "renew", "release"),
    "Jobs in the queue": ("submit", "jobs", "logs", "metrics", "wait", "cancel"),
    "Who has what, and why": ("status", "leases", "explain", "events"),
    "The daemon and its host": ("serve", "worker", "doctor", "db", "config"),
    "Taking GPUs out of use": ("node", "gpu"),
    "Access": ("token",),
}
"""The program's commands by what one wants to do. A command that is not listed is shown last, under `More`."""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": ("gpulease run -n 2 --wait 10m -- python train.py --epochs 3", "gpulease run -n 1 -- bash"),
    "acquire": ('eval "$(gpulease acquire -n 1 --ttl 2h)"',),
    "submit": (
        "gpulease submit -n 2 -- train.py --epochs 20",
        "gpulease submit --launcher plain -- make experiment",
        "gpulease submit --array 0-19%3 -- train.py --seed {index}",
    ),
    "jobs": ("gpulease jobs --state queued --state running",),
    "logs": ("gpulease logs -f job-82c4b92c1f47e880", "gpulease logs --tail 20 --rank 1 job-82c4b92c1f47e880"),
    "events": ("gpulease events --limit 20", "gpulease events --after 0 --follow --json"),
    "serve": ("gpulease serve", "gpulease serve --simulate 4 --port 0"),
    "worker": ("gpulease worker --url http://127.0.0.1:8750",),
    "cordon": ("gpulease gpu cordon GPU-bf4c", "gpulease gpu cordon gpubox:3"),
    "create": ("gpulease token create --user ada --role viewer --expires 30d",),
}
"""Examples at the end of a command's help."""
OPTIONS = "Options"
LIMITS = re.compile(r"; [^;\[\]]*<=?x[^;\]]*(?=\])|  \[[^;\]]*<=?x[^;\]]*\]")
"""The bounds of a number; docs/configuration.md has them, and so has the error."""


class Command(TyperCommand):
    """A command with its options under headings in its help (`rich_help_panel`), examples, and no Python types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name in the line `Usage`."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = _record(parameter, ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or OPTIONS
                sections.setdefault(heading, []).append(record)
        if list(sections) != [OPTIONS] and OPTIONS in sections:  # what every command has comes last
            sections[OPTIONS] = sections.pop(OPTIONS)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if examples := EXAMPLES.get(self.name or ""):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in examples))


class CommandsBySubject(TyperGroup):
    """A group that lists its commands under `SUBJECTS` in its help, or under one heading if none is named there."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        for heading, names in self._sections(ctx):
            rows = [(name, _sentence(self.commands[name])) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _sections(self, ctx: typer.Context) -> Iterator[tuple[str, list[str]]]:
        shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        left = list(shown)
        for heading, names in SUBJECTS.items():
            if ctx.parent is None and (here := [name for name in names if name in shown]):
                left = [name for name in left if name not in here]
                yield heading, here
        if left:
            yield ("Commands" if left == shown else "More"), left


def group(help: str) -> typer.Typer:
    """A group of commands such as `gpulease node`."""
    return typer.Typer(
        cls=CommandsBySubject, help=help, no_args_is_help=True, rich_markup_mode=None, add_completion=False
    )


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """The two columns of a parameter in the help."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    name, text = record
    if parameter.param_type_name == "argument":
        return name.split(" <")[0], text.removesuffix("[required]").rstrip()
    word = "N" if re.search(r"<(int|float)( range)?>", name) else parameter.name.upper().rstrip("S")
    name = re.sub(r"<list\[(.*)\]>$", r"<\1>", name)
    if "|" not in name:
        name = re.sub(r"<[^>]*>$", word, name)
    return name, LIMITS.sub("", text)


def _sentence(command: Any) -> str:
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return text.split(". ")[0].split(": ")[0].rstrip(".")
