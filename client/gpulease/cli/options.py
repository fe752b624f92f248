"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from gpulease.cli.durations import seconds
from gpulease.errors import InvalidRequest
from gpulease.model import Mask

Body = TypeVar("Body")
LEAST_STEP = 0.001
"""A setting that is a fraction is 0, or this at least: what is smaller is a slip, and divides to infinity."""


def duration(text: str | float) -> float:
    """Seconds, for an option's text; a default that is a number already is passed through."""
    if isinstance(text, float | int):
        return float(text)
    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def fraction(value: float | None) -> float | None:
    """The callback of an option that is a fraction and may be 0. Raises BadParameter for NaN and next to nothing."""
    if value is None or value == 0 or (math.isfinite(value) and abs(value) >= LEAST_STEP):
        return value
    raise typer.BadParameter(f"{value:g} is no such number; give 0 where that is allowed, or at least {LEAST_STEP:g}")


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
    int | None,
    typer.Option(
        min=1, max=2**63 - 1, help="The lease's token; by default from the environment, else from the daemon."
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="Only GPUs whose name contains this text.")]
Node = Annotated[str | None, typer.Option("--node", help="Only GPUs of this node.")]
MaskOption = Annotated[
    Mask | None,
    typer.Option(
        "--mask",
        show_default="indices for deepspeed and vLLM, else uuids",
        help="How CUDA_VISIBLE_DEVICES names the GPUs; indices for programs that read only numbers.",
    ),
]
