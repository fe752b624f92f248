"""This node's part of a job that runs on several nodes, as its supervisor sees it: it starts and ends with the others.

entered and checked -> link open -> prepared (the leader is reached) -> `go` from the daemon -> launched
another part ends or is out of reach -> this one ends
"""

from __future__ import annotations

import time
from pathlib import Path

from gpulease_protocol.node_protocol import GangPlace
from gpulease_worker.jobs import job_records
from gpulease_worker.jobs.gang_link import GangLink, PeerEnd
from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.spawn import LaunchError

GO_S = 300.0
"""How long a prepared node waits for the others of its job. The daemon gives the attempt up long before."""
POLL_S = 0.1
"""Pause between two looks at the others, until all are prepared."""
PEER_END_S = 3.0
"""How long a part may take to fail by itself, with a reason of its own, after another part has ended."""
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for a part that ends because of another."""


class GangPart:
    """The part of one supervisor."""

    def __init__(self, plan: LaunchPlan, place: GangPlace, directory: Path) -> None:
        self._place, self._port, self._go = place, plan.leased_port, directory / job_records.GO
        self._link = GangLink(place, plan.lease_id, plan.leased_port)
        self._until_s = 0.0
        self.peer_end: PeerEnd | None = None
        """The first end of another part."""
        self.is_stopped = False
        """True once this part was ended because of that."""
        self._stop_at_s: float | None = None

    @property
    def is_prepared(self) -> bool:
        """True once the leader is reached; on the leader, once it can be."""
        return self._link.is_ready

    @property
    def problem(self) -> str | None:
        """Why the leader cannot be reached, as a sentence."""
        return self._link.problem

    def open(self) -> None:
        """Begin to meet the others. Raises LaunchError where the port is taken."""
        self._until_s = time.monotonic() + GO_S
        try:
            self._link.open()
        except OSError as error:
            node, why = self._place.nodes[0], error.strerror
            raise LaunchError(f"Port {self._port} of node {node} cannot be used for the rendezvous: {why}.") from error

    def may_launch(self) -> bool:
        """True once all parts are prepared. Raises LaunchError when another part has ended, or it takes too long."""
        self.peer_end = self._link.advance()
        if self.peer_end is not None:
            raise LaunchError(self.peer_end.sentence)
        if self._go.exists():
            self._link.close_listener()
            return True
        if time.monotonic() > self._until_s:
            raise LaunchError(f"It was not told to start within {GO_S:g} s.")
        return False

    def stop_at_s(self, now_s: float, *, ordered: bool) -> float | None:
        """When this part must be stopped because another has ended, by the monotonic clock; None while none has, and
        once `stop` was called. At once where that is out of reach. `ordered`: the daemon has told it to stop, as it
        told the others, and it has the grace period of that to save what it has, though another is done sooner. What
        else stops it, a node that leaves or a signal, the daemon knows nothing of: it waits no longer for a part on a
        node that is silent."""
        if self.is_stopped:
            return None
        if self._stop_at_s is None:
            self.peer_end = self._link.advance()
            if self.peer_end is not None:
                self._stop_at_s = now_s + (0.0 if self.peer_end.is_lost else PEER_END_S)
        return None if ordered and self.peer_end is not None and not self.peer_end.is_lost else self._stop_at_s

    def stop(self) -> float:
        """Note that this part ends because of another. Returns its grace period."""
        self.is_stopped = True
        return GRACE_S

    def descriptors(self) -> list[int]:
        """What becomes readable when another part has something to say."""
        return self._link.descriptors()

    def close(self, *, ended_well: bool) -> None:
        """Tell the others that this part has ended."""
        self._link.close(ended_well=ended_well)
