"""The endpoints of limits, as `gpulease_protocol.endpoints` has the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpulease_protocol.codec import to_body
from gpulease_protocol.endpoints import ApiCall, encoded, get, list_page
from gpulease_protocol.model import Page

if TYPE_CHECKING:
    from gpulease_protocol.limits import LimitKind, LimitsRequest, LimitUse


def limits() -> ApiCall[Page[LimitUse]]:
    """`GET /v1/limits`."""
    from gpulease_protocol.limits import LimitUse

    return list_page("/v1/limits", LimitUse)


def limits_of(kind: LimitKind, name: str) -> ApiCall[LimitUse]:
    """`GET /v1/limits/{kind}/{name}`."""
    from gpulease_protocol.limits import LimitUse

    return get(f"/v1/limits/{encoded(kind)}/{encoded(name)}", LimitUse)


def set_limits(kind: LimitKind, name: str, request: LimitsRequest) -> ApiCall[LimitUse]:
    """`PUT /v1/limits/{kind}/{name}`; idempotent."""
    return replace(limits_of(kind, name), method="PUT", body=to_body(request), idempotent=True)


def remove_limits(kind: LimitKind, name: str) -> ApiCall[LimitUse]:
    """`DELETE /v1/limits/{kind}/{name}`. Not repeatable: the second one raises NotFound."""
    return replace(limits_of(kind, name), method="DELETE")
