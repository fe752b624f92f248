"""Request bodies of what an administrator does with a node."""

from __future__ import annotations

from typing import Annotated

from gpulease_protocol.bounds import Bounds, check_bounds
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.requests import RequestBody

REASON = Bounds(minLength=1, maxLength=200)
"""An administrator's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest(RequestBody):
    """Body of `POST /v1/nodes/{name}/drain`; may be left out."""

    reason: Annotated[str | None, REASON] = None
    """Why, for the users who wait, such as "driver update till 15:00"."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequest(RequestBody):
    """Body of `POST /v1/nodes/{name}/pause`; may be left out."""

    force: bool = False
    """Pause although leases are active there: they stay, but what happens on their GPUs is no longer seen."""
    reason: Annotated[str | None, REASON] = None
    """Why, for the users who wait, such as "driver update till 15:00"."""

    def __post_init__(self) -> None:
        check_bounds(self)
