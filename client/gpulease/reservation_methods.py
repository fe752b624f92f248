"""What both clients can do with reservations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulease.brief_errors import brief_errors_of
from gpulease.limit_methods import AsyncLimitMethods, LimitMethods
from gpulease_protocol import reservation_endpoints

if TYPE_CHECKING:
    from gpulease_protocol.reservations import Reservation, ReservationRequest


@brief_errors_of
class ReservationMethods(LimitMethods):
    """GPUs that are kept for someone in a window of time, for `Client`."""

    def reservations(self) -> tuple[Reservation, ...]:
        """The reservations that have not ended, in the order in which they begin."""
        return self.send(reservation_endpoints.reservations()).items

    def create_reservation(self, request: ReservationRequest) -> Reservation:
        """Reserve GPUs. For administrators. Raises InUse where a lease or another reservation is in the way."""
        return self.send(reservation_endpoints.create_reservation(request))

    def cancel_reservation(self, reservation_id: str) -> Reservation:
        """Take a reservation out of the calendar; it ends no lease. For administrators. Raises NotFound."""
        return self.send(reservation_endpoints.cancel_reservation(reservation_id))


@brief_errors_of
class AsyncReservationMethods(AsyncLimitMethods):
    """The same for `AsyncClient`."""

    async def reservations(self) -> tuple[Reservation, ...]:
        """The reservations that have not ended, in the order in which they begin."""
        return (await self.send(reservation_endpoints.reservations())).items

    async def create_reservation(self, request: ReservationRequest) -> Reservation:
        """Reserve GPUs. For administrators. Raises InUse where a lease or another reservation is in the way."""
        return await self.send(reservation_endpoints.create_reservation(request))

    async def cancel_reservation(self, reservation_id: str) -> Reservation:
        """Take a reservation out of the calendar; it ends no lease. For administrators. Raises NotFound."""
        return await self.send(reservation_endpoints.cancel_reservation(reservation_id))
