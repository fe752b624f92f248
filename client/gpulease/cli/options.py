"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from gpulease.cli.durations import seconds
from gpulease.errors import InvalidRequest

Body = TypeVar("Body")


def duration(text: str | float) -> float:
    """Seconds, for an option's text; a default that is a number already is passed through."""
    if isinstance(text, float | int):
        return float(text)
    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def checked(make: Callable[[], Body]) -> Body:
    """A request body. Raises InvalidRequest, a usage error, where the body refuses its fields."""
    try:
        return make()
    except ValueError as error:
        raise InvalidRequest(f"{error}.", remedy="Correct that option.") from error


Json = Annotated[bool, typer.Option("--json", help="Print the REST noun as JSON.")]
Gpus = Annotated[int, typer.Option("-n", "--gpus", help="How many GPUs.")]
Label = Annotated[str, typer.Option(help="Text shown to whoever waits.")]
Wait = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        show_default="not at all",
        help="How long to wait in the queue, such as 10m.",
    ),
]
Token = Annotated[
    int | None, typer.Option(help="The lease's token; by default from the environment, else from the daemon.")
]
Model = Annotated[str | None, typer.Option("--model", help="Only GPUs whose name contains this text.")]
Node = Annotated[str | None, typer.Option("--node", help="Only GPUs of this node.")]
