"""Reservations: look, make, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Response
from pydantic import TypeAdapter

from gpulease_protocol.errors import NotFound
from gpulease_protocol.model import Page
from gpulease_protocol.reservations import Reservation, ReservationRequest
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.long_lists import list_response
from gpulease_server.api.problems import error_responses
from gpulease_server.api.request_body import JsonBody
from gpulease_server.core.happenings import ReservationCancelled, ReservationRequested
from gpulease_server.runtime import ids

router = new_router("/v1/reservations", "reservations")
RESERVATION_JSON: TypeAdapter[object] = TypeAdapter(Reservation)
CREATE_BODY = JsonBody(ReservationRequest)


@router.get("", operation_id="listReservations", response_model=Page[Reservation])
async def list_reservations(daemon: DaemonDep) -> Response:
    """The reservations that have not ended, in the order in which they begin. The events `reservation.created`,
    `reservation.cancelled` and `reservation.ended` tell of former ones."""
    return await list_response(list(daemon.ledger.calendar.in_order()), lambda entry: entry, RESERVATION_JSON)


@router.post(
    "",
    operation_id="createReservation",
    status_code=201,
    response_description="Reserved.",
    openapi_extra=CREATE_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found", "in_use", "never_fits"),
)
async def create_reservation(
    body: Annotated[ReservationRequest, Depends(CREATE_BODY)], daemon: DaemonDep, caller: CallerDep
) -> Reservation:
    """Reserve GPUs for a user or a group in a window of time: from this answer on, no lease of anyone else gets them
    that could last into it. Refused where a lease of someone else is in the way that may last so long, or another
    reservation."""
    reservation_id = ids.new_id("reservation")
    asked = ReservationRequested(
        cause=ids.new_id("request"),
        reservation_id=reservation_id,
        from_at=body.from_at,
        to_at=body.to_at,
        node=body.node,
        count=body.count,
        uuids=tuple(body.gpus),
        user=body.user,
        group=body.group,
        reason=body.reason,
        by=caller.user,
    )
    await daemon.submit(asked)
    return daemon.ledger.calendar.entries[reservation_id]


@router.delete("/{reservation_id}", operation_id="cancelReservation", responses=error_responses("not_found"))
async def cancel_reservation(reservation_id: str, daemon: DaemonDep, caller: CallerDep) -> Reservation:
    """Take a reservation out of the calendar, before its time or within it, and return it. It ends no lease."""
    known = daemon.ledger.calendar.entries.get(reservation_id)
    cause = ids.new_id("request")
    await daemon.submit(ReservationCancelled(cause=cause, reservation_id=reservation_id, by=caller.user))
    if known is None:
        raise NotFound(f"There is no reservation {reservation_id}.", remedy="`GET /v1/reservations` lists all.")
    return known
