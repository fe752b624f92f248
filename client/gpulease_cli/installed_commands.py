"""Commands that other packages bring: the server `serve` and `db`, the worker `worker` and `doctor`.

They are entry points of the group `gpulease.commands`. The module of a command is imported only when the command runs
or its help is shown, so `gpulease status` pays for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

GROUP = "gpulease.commands"
PACKAGE = "gpulease_"
"""What the name of a package begins with; the rest is the extra that installs what it needs."""


def entry_points() -> dict[str, Any]:
    """The commands that packages bring, by name."""
    # Of this distribution alone: a search through all that are installed would take 20 ms or more.
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 - most commands need none

    try:
        return {point.name: point for point in distribution("gpulease").entry_points.select(group=GROUP)}
    except PackageNotFoundError:
        return {}


def brought_along(name: str) -> click.Command:
    """The command of this name. Where its package cannot be imported: a command that says what to install."""
    point = entry_points().get(name)
    if point is None:
        raise click.UsageError(
            f"No installed package provides {name!r}: install gpulease again (pip install -e . in a checkout)."
        )
    try:
        command: click.Command = point.load()
    except ModuleNotFoundError as error:
        return _missing(name, point.module.split(".")[0].removeprefix(PACKAGE), error)
    return command


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say in three lines what to install when an import in the block fails for want of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.exceptions.Exit(_complain(name, error)) from error


def _missing(name: str, extra: str, error: ModuleNotFoundError) -> click.Command:
    """A command that takes any arguments and says what to install."""

    @click.command(
        name,
        help=f"Not installed; needs the extra `{extra}`.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> int:
        return _complain(extra, error)

    return command


def _complain(extra: str, error: ModuleNotFoundError) -> int:
    from gpulease_cli import output  # noqa: PLC0415 - after a failure only

    output.print_error(
        f"this command needs the extra `{extra}`",
        f"the package {error.name} is not installed",
        f"pip install 'gpulease[{extra}]'",
    )
    return output.REFUSED
