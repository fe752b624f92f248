"""Options and arguments as this program declares them: `@option(...)` and `@argument(...)` above a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

Derive = Callable[[Mapping[str, Any]], Any]
OPTIONS = "Options"
"""The heading of options that have none of their own."""


class Option(click.Option):
    """An option with a heading in the help, and the type of its value as a configuration file has it."""

    def __init__(
        self, *names: Any, heading: str = OPTIONS, kind: Any = str, derive: Derive | None = None, **more: Any
    ) -> None:
        more.setdefault("show_default", more.get("default", "") not in ("", ()))
        super().__init__(*names, **more)
        self.takes_nothing = "default" in more
        """May be empty, as a default of "" is; else nothing would be taken for an option that was left out."""
        self.heading = heading
        self.kind = kind
        self.derive = derive
        """Makes the default from the values of all settings, where it depends on the host or on others."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value in its type. Fails for one that is empty, as a variable of a shell is that is not set."""
        if not self.takes_nothing and (value == "" or (self.multiple and "" in value)):
            raise click.BadParameter("must not be empty; was a variable to be here, and is unset?", ctx, self)
        return super().type_cast_value(ctx, value)


class Argument(click.Argument):
    """An argument with a line in the help."""

    def __init__(self, *names: Any, help: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.help = help  # click itself has it since 8.5


option = partial(click.option, cls=Option)
argument = partial(click.argument, cls=Argument)
