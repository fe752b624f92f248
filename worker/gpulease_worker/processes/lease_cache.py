"""Remembers what the worker alone knows of a lease: its owner's start time, when the lease was first seen, and the user
id of its user on this node, which is `NO_USER` until it is known.

Pids are reused. Where the daemon knows no more of an owner than its pid, the worker reads the start time when it first
sees the lease, and keeps it on disk: after a restart the pid may already be another process's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from gpulease_protocol import codec
from gpulease_protocol.host.process_id import ProcessId, boot_id
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import LeaseState, Noun
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.processes import procfs
from gpulease_worker.processes.lease_claims import NO_USER
from gpulease_worker.processes.user_names import USER_IDS

FILE = "leases.json"
SAVE_AGAIN_S = 1.0
"""Pause before another attempt to write it. Otherwise it is written only when something changes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLease(NodeLease):
    """A lease with GPUs on this node, with what only the worker knows of it."""

    owner: ProcessId | None = None
    """The process that owns it; null if only its pid is known and it was gone when the worker first saw the lease."""
    since_ticks: int | None = None
    """The last moment at which the lease was certainly not granted yet, in clock ticks since boot; null where no worker
    of this boot knows one."""
    descendants: tuple[ProcessId, ...] = ()
    """Processes that descend, or descended, from the owner, see `owner_descendants`. Of several leases of one owner,
    the first alone has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCacheFile(Noun):
    """The content of `leases.json`."""

    boot_id: str
    """The boot in which the ticks are valid."""
    leases: tuple[CachedLease, ...] = ()
    """Every lease that has GPUs here."""
    as_of_ticks: int | None = None
    """A moment in clock ticks since boot: every lease that is not in the file was granted later. It may be long ago,
    since the file is written only when something changes. Null where it is not known, as in the file of an older
    worker."""


class LeaseCache:
    """Remembers each lease from when it was first seen until it has no GPU here any more.

    Args:
        data_dir: The worker's, which contains the file.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._leases: dict[str, CachedLease] = {}
        self._named: Sequence[NodeLease] | None = None
        """What these were made from; None before the daemon has named any."""
        self._sent_at_ticks: int | None = None
        """When the last report was sent that was answered; of an earlier worker, as its file says."""
        self._unsaved = ""
        """Why the file is not up to date; empty where it is."""
        self._save_again_s = 0.0

    def load(self) -> None:
        """Load what an earlier worker has remembered since the machine was booted."""
        try:
            content = codec.from_json(LeaseCacheFile, json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.warning("cannot read %s, so the owners of leases are identified again: %s", self._path, error)
            return
        if content.boot_id == boot_id() != "":
            self._leases = {lease.id: lease for lease in content.leases}
            self._sent_at_ticks = content.as_of_ticks

    def update(self, leases: Sequence[NodeLease], sent_at_ticks: int | None = None) -> tuple[CachedLease, ...]:
        """The leases that the daemon names now, with what is known of each. Forgets all others.

        `sent_at_ticks`: when the report was sent, if these leases have just arrived in its answer. A lease that an
        answer does not name was granted after that report was sent, however late the next answer shows it.
        """
        if leases is not self._named:
            self._replace(leases)
        if self._unsaved and time.monotonic() >= self._save_again_s:
            self._save()
        if sent_at_ticks is not None:
            self._sent_at_ticks = sent_at_ticks
        return tuple(self._leases.values())

    def owners(self) -> frozenset[ProcessId]:
        """The owner of each lease that has one."""
        return frozenset(lease.owner for lease in self._leases.values() if lease.owner is not None)

    def owner_of(self) -> dict[ProcessId, ProcessId]:
        """The owner of each process that is remembered as a descendant."""
        return remembered_owners(self._leases.values())

    def remember(self, owner_of: Mapping[ProcessId, ProcessId]) -> None:
        """Replace what is remembered of descendants."""
        below: dict[ProcessId, list[ProcessId]] = {}
        for process, owner in owner_of.items():
            below.setdefault(owner, []).append(process)
        previous = self._leases
        self._leases = {
            lease.id: replace(lease, descendants=tuple(below.pop(lease.owner, ())) if lease.owner else ())
            for lease in previous.values()
        }
        if self._leases != previous:
            self._save()

    def _replace(self, leases: Sequence[NodeLease]) -> None:
        previous, remembered = self._leases, self.owner_of()
        self._named, self._leases = leases, {lease.id: self._cached(lease, previous.get(lease.id)) for lease in leases}
        if remembered:
            self.remember(remembered)  # a lease that is forgotten leaves them to the next one of its owner
        if _remembered(self._leases) != _remembered(previous):
            self._save()

    def _cached(self, lease: NodeLease, previous: CachedLease | None) -> CachedLease:
        lease_fields = {item.name: getattr(lease, item.name) for item in fields(NodeLease)} | {
            "uid": _uid(lease, previous)
        }
        if previous is not None:
            return CachedLease(
                **lease_fields, owner=previous.owner, since_ticks=previous.since_ticks, descendants=previous.descendants
            )
        return CachedLease(**lease_fields, owner=_owner(lease), since_ticks=self._sent_at_ticks)

    def _save(self) -> None:
        # Not synced: a reboot makes start times meaningless, and a crash of the worker alone loses nothing.
        temporary = self._path.with_name(f".{FILE}")  # one worker has the directory: what another left is replaced
        content = LeaseCacheFile(
            boot_id=boot_id(), leases=tuple(self._leases.values()), as_of_ticks=self._sent_at_ticks
        )
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)  # which processes hold what is not for other users
            temporary.write_text(json.dumps(codec.to_json(content)), encoding="utf-8")
            temporary.rename(self._path)
        except OSError as error:
            if self._unsaved != str(error):
                log.warning("cannot write %s, so a restart of the worker would forget owners: %s", self._path, error)
            self._unsaved, self._save_again_s = str(error), time.monotonic() + SAVE_AGAIN_S
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        else:
            if self._unsaved:
                log.info("%s is written again", self._path)
            self._unsaved = ""


def _remembered(leases: Mapping[str, CachedLease]) -> dict[str, object]:
    """By lease, what a worker that is started again cannot learn from the daemon. That a lease has ended, it can."""
    return {
        lease_id: (lease.owner, lease.since_ticks, lease.descendants, lease.user, lease.uid)
        for lease_id, lease in leases.items()
    }


def remembered_owners(leases: Iterable[CachedLease]) -> dict[ProcessId, ProcessId]:
    """The owner of each process that these leases remember as a descendant of theirs."""
    return {process: lease.owner for lease in leases if lease.owner is not None for process in lease.descendants}


def _uid(lease: NodeLease, previous: CachedLease | None) -> int | None:
    """The user id that may claim the lease; None if every user may, because the daemon does not know it."""
    if lease.uid is not None or lease.user is None:
        return lease.uid
    if previous is not None and previous.user == lease.user and previous.uid not in (None, NO_USER):
        return previous.uid
    uid = USER_IDS.uid_of(lease.user)
    return NO_USER if uid is None else uid


def _owner(lease: NodeLease) -> ProcessId | None:
    if lease.owner_pid is None:
        return None
    if lease.owner_user is not None and not procfs.runs_as(lease.owner_pid, lease.owner_user):
        return None
    if lease.owner_start_ticks is not None:
        return ProcessId(lease.owner_pid, lease.owner_start_ticks)
    return ProcessId.of(lease.owner_pid) if lease.state is LeaseState.ACTIVE else None
