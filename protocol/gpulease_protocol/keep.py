"""Keeping idle GPUs on purpose: what the holder of a lease says, and the endpoint for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from gpulease_protocol.bounds import TIME, Bounds, check_bounds, check_field
from gpulease_protocol.codec import to_body
from gpulease_protocol.endpoints import ApiCall, encoded, get
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease
from gpulease_protocol.requests import HolderProof

MAX_REASON = 500
"""Characters of a reason, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRequest(HolderProof):
    """Body of `POST /v1/leases/{id}/keep`."""

    reason: Annotated[str, Bounds(minLength=1, maxLength=MAX_REASON)]
    """Why idle GPUs are kept; who waits for them is told."""
    for_s: Annotated[float, TIME]
    """For how long from now, over 0; the administrator sets a bound, 24 hours unless told otherwise. The last request
    counts, also where it is for a shorter time."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_field(bool(self.reason.strip()), "reason", "must say why the GPUs are kept")
        check_field(self.reason.isprintable(), "reason", "must have characters that can be printed alone")


def keep_lease(lease_id: str, request: KeepRequest) -> ApiCall[Lease]:
    """`POST /v1/leases/{id}/keep`. The fencing token makes it safe to repeat."""
    return replace(
        get(f"/v1/leases/{encoded(lease_id)}/keep", Lease), method="POST", body=to_body(request), idempotent=True
    )
