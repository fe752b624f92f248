"""The endpoints of reservations, as `gpulease_protocol.endpoints` has the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpulease_protocol.codec import to_body
from gpulease_protocol.endpoints import ApiCall, encoded, get, list_page
from gpulease_protocol.model import Page

if TYPE_CHECKING:
    from gpulease_protocol.reservations import Reservation, ReservationRequest


def reservations() -> ApiCall[Page[Reservation]]:
    """`GET /v1/reservations`."""
    from gpulease_protocol.reservations import Reservation

    return list_page("/v1/reservations", Reservation)


def create_reservation(request: ReservationRequest) -> ApiCall[Reservation]:
    """`POST /v1/reservations`. Not repeatable: a second one of `node` and `count` takes other GPUs."""
    from gpulease_protocol.reservations import Reservation

    return replace(get("/v1/reservations", Reservation), method="POST", body=to_body(request))


def cancel_reservation(reservation_id: str) -> ApiCall[Reservation]:
    """`DELETE /v1/reservations/{reservation_id}`. Not repeatable: the second one raises NotFound."""
    from gpulease_protocol.reservations import Reservation

    return replace(get(f"/v1/reservations/{encoded(reservation_id)}", Reservation), method="DELETE")
