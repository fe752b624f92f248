"""Groups of commands, such as `gpulease node`. A command is imported when it is run, or when its own help is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from gpulease_cli import installed_commands
from gpulease_cli.command_table import Row
from gpulease_cli.help_format import Command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = "gpulease_cli.commands"


class NoSuchCommand(click.UsageError):
    """There is no command of this name."""

    def __init__(self, name: str, context: click.Context) -> None:
        super().__init__(f"there is no command {name}", context)
        self.name = name


class Commands(Mapping[str, click.Command]):
    """Commands by name, each imported when it is looked up."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self._rows = rows
        self._imported: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._imported:
            self._imported[name] = _imported(name, self._rows[name])
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class CommandGroup(click.Group):
    """A group of commands. Without a command it prints its help."""

    command_class = Command

    def __init__(self, name: str, help: str, rows: Mapping[str, Row] | None = None, **attributes: Any) -> None:
        super().__init__(name, help=help, **attributes)
        self._rows = rows or {}
        if rows is not None:
            self.commands: Any = Commands(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help where nothing else is asked for."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its arguments. Raises NoSuchCommand."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise NoSuchCommand(args[0], ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of its commands, in the order of the table."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        self.write_commands("Commands", self.commands, formatter)

    def write_commands(self, heading: str, names: Iterable[str], formatter: click.HelpFormatter) -> None:
        """Write some of its commands with their summaries."""
        with formatter.section(heading):
            formatter.write_dl([(name, self._summary(name)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its commands and options that begin with what was typed; imports none of the commands."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only when a shell asks

        names = [name for name in self.commands if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._summary(name)) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _summary(self, name: str) -> str:
        return self._rows[name].summary if name in self._rows else summary(self.commands[name])


def summary(command: click.Command) -> str:
    """The beginning of a command's help, up to the first full stop or colon."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return text.split(". ")[0].split(": ")[0].rstrip(".")


def _imported(name: str, row: Row) -> click.Command:
    if row.below:
        return CommandGroup(name, f"{row.summary}.", row.below)
    if not row.function:
        return installed_commands.brought_along(name)
    module, _, function = row.function.partition(":")
    found: click.Command = getattr(import_module(f"{COMMANDS}.{module}"), function)
    return found
