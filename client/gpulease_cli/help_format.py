"""Commands of this program and the form of their `--help`: options under headings, then examples.

```python
@command(examples=("gpulease cancel job-82c4b92c1f47e880",))
@argument("job", metavar="JOB", help="Job id.")
@JSON
def cancel(job: str, json: bool) -> None: ...
```
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from gpulease_cli.global_options import GLOBAL_OPTIONS
from gpulease_cli.parameters import OPTIONS
from gpulease_protocol.errors import InvalidRequest

SECONDS = re.compile(r"([0-9]+) seconds, not ([0-9]+)")
"""How the daemon refuses a length of time."""
HELP_OPTIONS = ("-h", "--help")
ARGUMENTS_LAST = {"allow_interspersed_args": False}
"""What follows the command's first argument belongs to the program that it names, options included."""


class Command(click.Command):
    """A command with examples in its help. The program's own options may be given after its name, too."""

    def __init__(self, *more: Any, examples: tuple[str, ...] = (), section: str = "", **attributes: Any) -> None:
        super().__init__(*more, **attributes)
        self.examples = examples
        self.section = section
        """The section of the configuration file that has defaults for its options: `serve` or `worker`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters and the global options; of two with the same name its own."""
        own = super().get_params(ctx)
        taken = {name for parameter in own for name in parameter.opts}
        return [*own, *(one for one in GLOBAL_OPTIONS if not taken.intersection(one.opts))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an error names this command."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. A refusal of the daemon is put in the words of the command line."""
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            raise _in_flags(error, self.params) from error

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: they are written with the options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in super().get_params(ctx):
            if isinstance(parameter, click.Argument):
                row = (parameter.human_readable_name, getattr(parameter, "help", None) or "")
                sections.setdefault("Arguments", []).append(row)
            elif record := parameter.get_help_record(ctx):
                sections.setdefault(getattr(parameter, "heading", OPTIONS), []).append(record)
        if list(sections) != [OPTIONS] and OPTIONS in sections:  # what every command has comes last
            sections[OPTIONS] = sections.pop(OPTIONS)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Makes a function a command. It returns its exit code; None means 0."""
    return click.command(name, cls=Command, **attributes)


def flags(parameter: click.Parameter) -> str:
    """A parameter as users write it: `-n/--gpus`, or the word that stands for an argument."""
    return parameter.human_readable_name if isinstance(parameter, click.Argument) else "/".join(parameter.opts)


def _in_flags(error: InvalidRequest, parameters: list[click.Parameter]) -> InvalidRequest:
    """The error about the option that a field of the request was made from, if it names one."""
    if type(error) is not InvalidRequest:
        return error
    field, colon, rest = error.detail.partition(": ")
    for parameter in parameters:
        if colon and field in (getattr(parameter.type, "field", None), parameter.name):
            rest = SECONDS.sub(lambda found: f"{_length(found[1])}, not {_length(found[2])}", rest)
            return InvalidRequest(f"{flags(parameter)}: {rest}", remedy=error.remedy)
    return error


def _length(seconds: str) -> str:
    """A length of time as one would type it."""
    from gpulease_protocol.status_table import format_duration  # noqa: PLC0415 - after a mistake only

    return format_duration(float(seconds)).removesuffix(" 0h").removesuffix(" 00m").removesuffix(" 00s")
