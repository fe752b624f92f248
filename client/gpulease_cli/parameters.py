"""Options and arguments as this program declares them: `@option(...)` and `@argument(...)` above a command."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

OPTIONS = "Options"
"""The heading of options that have none of their own."""


class Option(click.Option):
    """An option with a heading in the help, and the type of its value as a configuration file has it."""

    def __init__(self, *names: Any, heading: str = OPTIONS, kind: Any = str, **more: Any) -> None:
        more.setdefault("show_default", more.get("default", "") not in ("", ()))
        super().__init__(*names, **more)
        self.heading = heading
        self.kind = kind


class Argument(click.Argument):
    """An argument with a line in the help."""

    def __init__(self, *names: Any, help: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.help = help  # click itself has it since 8.5


option = partial(click.option, cls=Option)
argument = partial(click.argument, cls=Argument)
