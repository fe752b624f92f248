"""Announces a wait in the queue, so that a script that waits does not look as if it hung. Sans I/O (see `effects`).

    gpulease waits for 2 GPUs, 1st in the queue: GPUs 0, 1: bob (resnet) for 2h 10m. Ctrl-C gives up.

A line of the logger `gpulease` at level WARNING, which Python prints on stderr where no logging is configured. It comes
after `ANNOUNCE_AFTER_S`, and again when the place or who is in the way has changed, at most every `REPEAT_AFTER_S`. One
request of a process speaks at a time, and of the ranks of a training the first. A caller with an `on_queued` of its own
hears nothing, unless that has a true attribute `announces`.
"""

from __future__ import annotations

import logging
import time
from typing import ClassVar

from gpulease.cuda import ranks
from gpulease.sansio.effects import Flow
from gpulease.sansio.failover import Failover
from gpulease_protocol import endpoints
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import Lease
from gpulease_protocol.obstacle_groups import describe_wait
from gpulease_protocol.status_table import describe_demand

LOG = logging.getLogger("gpulease")

ANNOUNCE_AFTER_S = 1.0
"""A request that is granted within this time is not announced."""
REPEAT_AFTER_S = 60.0
"""Least time between two lines about one request."""
LOOK_AFTER_S = 20.0
"""Least time between two looks at why it waits."""


class WaitAnnouncement:
    """What is said about one request that waits. As a context: while it may speak."""

    _speaker: ClassVar[WaitAnnouncement | None] = None

    def __init__(self, failover: Failover, *, silent: bool) -> None:
        self._failover = failover
        self._silent = silent or not ranks.is_first_rank()
        self._told: object = None
        """What the last line was about."""
        self._next_s = time.monotonic() + ANNOUNCE_AFTER_S

    def __enter__(self) -> WaitAnnouncement:
        return self

    def __exit__(self, *_: object) -> None:
        if WaitAnnouncement._speaker is self:
            WaitAnnouncement._speaker = None

    @property
    def longest_poll_s(self) -> float:
        """How long the next poll may be held."""
        return float("inf") if self._silent or self._told is not None else ANNOUNCE_AFTER_S

    def after_poll(self, lease: Lease) -> Flow[None]:
        """Say why the request still waits, if that is new."""
        now_s = time.monotonic()
        if self._silent or now_s < self._next_s or WaitAnnouncement._speaker not in (None, self):
            return
        WaitAnnouncement._speaker, self._next_s = self, now_s + LOOK_AFTER_S
        try:
            explanation = yield from self._failover.send(endpoints.explain(lease.id))
        except GpuleaseError:
            return
        about = (explanation.position, {(one.code, one.uuid, one.lease_id) for one in explanation.obstacles})
        if explanation.verdict == "granted" or about == self._told:
            return
        self._told, self._next_s = about, now_s + REPEAT_AFTER_S
        wanted = describe_demand(lease.demand)
        LOG.warning("gpulease waits for %s%s. Ctrl-C gives up.", wanted, describe_wait(explanation))

    def gave_up(self, interruption: BaseException) -> None:
        """Say that the request was withdrawn, where the wait was announced or a user has pressed Ctrl-C."""
        if not self._silent and (self._told is not None or isinstance(interruption, KeyboardInterrupt)):
            LOG.warning("gpulease gave up: the request is out of the queue.")
