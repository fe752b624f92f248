"""The leases of this node as the worker has seen them begin, which says which processes are theirs.

A pid is used again. Where the daemon knows of an owner no more than that, the worker learns the start time that goes
with it when it first sees the lease, and keeps it on disk: a worker that starts anew must not learn it a second time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gpulease import wire
from gpulease.exchange import NodeLease
from gpulease.model import LeaseState, Noun
from gpulease.owner import boot_id
from gpulease_worker import processes

FILE = "leases.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLease(NodeLease):
    """A lease with GPUs on this node, and what only the worker can know of it."""

    owner: processes.Identity | None = None
    """The process that owns it; null if only its pid is known and it was gone when the worker first saw the lease."""
    since_ticks: int | None = None
    """A moment before the lease began, in clock ticks since boot: the last at which it was certainly not granted yet.
    Where this worker knows none: when it first saw the lease; null if that had ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Noun):
    """What is on disk."""

    boot_id: str
    """The boot in which the ticks count."""
    leases: tuple[SeenLease, ...] = ()
    """Every lease that has GPUs here."""


class Holders:
    """Remembers each lease from the first sight of it until it has no GPU here any more.

    Args:
        data_dir: The worker's; the file lies in it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._seen: dict[str, SeenLease] = {}
        self._asked_ticks: int | None = None

    def recover(self) -> None:
        """Take up what an earlier worker has seen since the machine was started."""
        try:
            kept = wire.from_json(Kept, json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, so owners of leases are learnt anew: %s", self._path, error)
            return
        if kept.boot_id == boot_id():
            self._seen = {lease.id: lease for lease in kept.leases}

    def see(self, leases: Sequence[NodeLease], asked_ticks: int | None = None) -> tuple[SeenLease, ...]:
        """The leases that the daemon names now, with what is known of each. Forgets all others.

        `asked_ticks`: when the daemon was asked, if it has just answered with them. A lease that an answer does not
        name was granted after that was asked for, however short it was and however late the next answer shows it.
        """
        known = self._seen
        self._seen = {lease.id: self._sight(lease, known.get(lease.id)) for lease in leases}
        if asked_ticks is not None:
            self._asked_ticks = asked_ticks
        if self._seen != known:
            self._keep()
        return tuple(self._seen.values())

    def _sight(self, lease: NodeLease, known: SeenLease | None) -> SeenLease:
        told = {item.name: getattr(lease, item.name) for item in fields(NodeLease)}
        if known is not None:
            return SeenLease(**told, owner=known.owner, since_ticks=known.since_ticks)
        since_ticks = self._asked_ticks
        if since_ticks is None and lease.state is LeaseState.ACTIVE:
            since_ticks = processes.ticks_now()
        return SeenLease(**told, owner=_owner(lease), since_ticks=since_ticks)

    def _keep(self) -> None:
        # Not synced: after a crash of the machine start times mean nothing, and a crash of the worker loses nothing.
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            kept = Kept(boot_id=boot_id(), leases=tuple(self._seen.values()))
            temporary.write_text(json.dumps(wire.to_json(kept)), encoding="utf-8")
            temporary.rename(self._path)
        except OSError as error:
            log.warning("%s cannot be written, so a restart of the worker forgets owners: %s", self._path, error)


def _owner(lease: NodeLease) -> processes.Identity | None:
    if lease.owner_pid is None:
        return None
    if lease.owner_start_ticks is not None:
        return processes.Identity(lease.owner_pid, lease.owner_start_ticks)
    return processes.Identity.of(lease.owner_pid) if lease.state is LeaseState.ACTIVE else None
