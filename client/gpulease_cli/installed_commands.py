"""Commands that other packages bring: the server `serve` and `db`, the worker `worker` and `doctor`.

They are entry points of the group `gpulease.commands`, each a function or a `typer.Typer`. The module of a command is
imported only when the command runs or its help is shown, so `gpulease status` pays for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import typer

from gpulease_cli import output
from gpulease_cli.help_format import Command

GROUP = "gpulease.commands"
PACKAGE = "gpulease_"
"""What the name of a package begins with; the rest is the extra that installs what it needs."""


class Commands(Mapping[str, Any]):
    """The program's own commands by name, and those of the installed packages, imported when they are looked up."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._loaded = dict(own)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(self._entry_points[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._loaded, **self._entry_points})

    def __len__(self) -> int:
        return len({**self._loaded, **self._entry_points})

    @cached_property
    def _entry_points(self) -> dict[str, Any]:
        # Of this distribution alone: a search through all that are installed would take 20 ms or more.
        from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 - most commands need none

        try:
            return {point.name: point for point in distribution("gpulease").entry_points.select(group=GROUP)}
        except PackageNotFoundError:
            return {}


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say in three lines what to install when an import in the block fails for want of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        _complain(name, error)
        raise typer.Exit(output.REFUSED) from error


def _load(point: Any) -> Any:
    """The command of an entry point. Where its package cannot be imported: a command that says what to install."""
    extra = point.module.split(".")[0].removeprefix(PACKAGE)
    try:
        brought = point.load()
    except ModuleNotFoundError as error:
        brought = _missing(extra, error)
    if isinstance(brought, typer.Typer):
        return typer.main.get_command(brought)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(point.name, cls=Command)(brought)
    return typer.main.get_command(app)


def _missing(extra: str, error: ModuleNotFoundError) -> typer.Typer:
    """A command that takes any arguments and says what to install."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(
        help=f"Not installed; needs the extra `{extra}`.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> int:
        _complain(extra, error)
        return output.REFUSED

    return app


def _complain(extra: str, error: ModuleNotFoundError) -> None:
    output.print_error(
        f"this command needs the extra `{extra}`",
        f"the package {error.name} is not installed",
        f"pip install 'gpulease[{extra}]'",
    )
