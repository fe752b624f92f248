"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import Mask

Body = TypeVar("Body")
LONGEST_S = 100 * 366 * 86400.0
"""A century: nothing here takes longer."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Seconds in `90s`, `10m`, `1.5h`, `2d`, `300`; at most a century. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 10m, 1.5h or 300 (seconds)")
    length_s = float(match[1]) * UNITS_S[match[2]]
    if length_s > LONGEST_S:
        raise ValueError(f"{text!r} is longer than a century; write it like 90s, 10m, 1.5h or 300 (seconds)")
    return length_s


def duration(text: str | float) -> float:
    """Parses an option's text as seconds; a default that is already a number passes through."""
    if isinstance(text, float | int):
        return float(text)
    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def checked(make: Callable[[], Body]) -> Body:
    """The request body that `make` builds. Raises InvalidRequest, a usage error, for a field that is not allowed."""
    try:
        return make()
    except ValueError as error:
        raise InvalidRequest(f"{error}.", remedy="Correct this option and try again.") from error


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gpus = Annotated[int, typer.Option("-n", "--gpus", help="Number of GPUs.")]
Label = Annotated[str, typer.Option(metavar="TEXT", help="Shown to users who wait for these GPUs.")]
Wait = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        show_default="do not wait",
        help="Maximum wait in the queue, such as 10m.",
    ),
]
Token = Annotated[
    int | None,
    typer.Option(
        min=1, max=2**63 - 1, help="The lease's fencing token; by default from the environment, else from the daemon."
    ),
]
Model = Annotated[str | None, typer.Option("--model", metavar="TEXT", help="Only GPUs with TEXT in their name.")]
Node = Annotated[str | None, typer.Option("--node", metavar="NAME", help="Only GPUs of this node.")]
MaskOption = Annotated[
    Mask | None,
    typer.Option(
        "--mask",
        show_default="indices for deepspeed and vLLM, else uuids",
        help="How CUDA_VISIBLE_DEVICES names the GPUs; use indices for programs that accept only numbers.",
    ),
]
