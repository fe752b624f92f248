"""Keeps the pilots of one pool, in rounds; see the package for the states and what each failure does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from gpulease_fleet.carrier import Carried, CarriedState, Carrier, PilotName, SubmitError
from gpulease_fleet.records import PilotRow, PoolRecord, Records

SUBMITTING, PENDING, RUNNING, ENDING, ENDED, GONE = "submitting", "pending", "running", "ending", "ended", "gone"
LIVE = (SUBMITTING, PENDING, RUNNING, ENDING)
"""States in which the engine may have the pilot."""
SEEN_S, ENDS_S = 5.0, 60.0
"""What is written no more often: that a pilot is still listed, and an end that has moved by less. Seconds."""
STOP_S = 180.0
"""A pilot that was asked to end is ended at once after this. Seconds."""
FORGET_S = 20.0
"""A node that has not left is forgotten so long after its token was revoked: by then its refused worker has ended the
jobs that are tried elsewhere from then on. Seconds."""
MAX_FAILED_SUBMISSIONS, MAX_FAILED_STARTS = 10, 3
"""So many in a row pause the pool."""
AGAIN_S = 60.0
"""After a failure the next submission comes 1 s after the last one, then 3, 7, ... and at most this. Seconds."""

log = logging.getLogger(__name__)


class DaemonView(Protocol):
    """What a pool asks of the daemon, and tells it. All raise `GpuleaseError`."""

    def ready_nodes(self) -> frozenset[str]:
        """Names of the nodes that report."""

    def known_nodes(self) -> frozenset[str]:
        """Names of all nodes."""

    def idle_nodes(self) -> frozenset[str]:
        """Names of the nodes with all GPUs free."""

    def has_queue(self) -> bool:
        """True while a request waits for GPUs."""

    def make_token(self, note: str) -> str:
        """A new token for a worker, with a note by which it is found."""

    def has_token(self, note: str) -> bool:
        """True if a token with that note is valid."""

    def revoke_tokens(self, note: str) -> None:
        """Revoke every token with that note."""

    def forget(self, node: str) -> bool:
        """Forget a node that has lost its allocation. False while its worker is still heard."""


class Pool:
    """The pilots of one pool. `tick` makes one round; whatever ends it, the next round goes on from the records."""

    def __init__(self, records: Records, carrier: Carrier, daemon: DaemonView) -> None:
        self._records, self._carrier, self._daemon = records, carrier, daemon

    def tick(self, now: float) -> bool:
        """One round. True when something is under way that the next round should not wait long for.

        Raises `EngineUnavailable` and `GpuleaseError` when the engine or the daemon does not answer: nothing was
        decided then that depends on it.
        """
        listed = self._carrier.list(self._records.pool)
        rows = self._take_in(listed, now)
        self._settle_ended(rows, now)
        self._note_ready()
        pool = self._records.read_pool()
        assert pool is not None
        self._stop_late(listed, now)
        rows = self._records.pilots()
        live = [row for row in rows if row.state in (SUBMITTING, PENDING, RUNNING)]
        if len(live) > (most := 0 if pool.down else pool.most):
            self._stop_some(live[::-1], len(live) - most, listed, now)
        elif not pool.down:
            self._grow_or_shrink(pool, live, listed, now)
        return any(row.state in (SUBMITTING, PENDING, ENDING, ENDED) for row in self._records.pilots())

    def _take_in(self, listed: Sequence[Carried], now: float) -> list[PilotRow]:
        """Bring the rows up to date with the engine's list. Cancels pilots that are none of the rows'."""
        rows = {row.ordinal: row for row in self._records.pilots()}
        seen: dict[int, Carried] = {}
        own = {row.handle for row in rows.values() if row.handle}
        for pilot in sorted(
            listed,
            key=lambda one: (one.state is CarriedState.GONE, one.name.generation, one.handle not in own, one.handle),
        ):
            row, name = rows.get(pilot.name.ordinal), pilot.name
            lost = row is None or name.generation > row.generation
            if lost and pilot.state is not CarriedState.GONE:
                log.warning("pilot %s is not in the records: adopted", name)
                row = PilotRow(
                    pool=name.pool,
                    ordinal=name.ordinal,
                    generation=name.generation,
                    state=PENDING,
                    last_seen=now,
                    since=now,
                )
                self._records.put(row)
                rows[name.ordinal] = row
            if row is None or name.generation != row.generation or row.state in (ENDED, GONE):
                self._cancel(pilot, "a former generation")
            elif name.ordinal in seen and seen[name.ordinal].handle != pilot.handle:
                self._cancel(pilot, "submitted twice")
            else:
                seen[name.ordinal] = pilot
        for row in rows.values():
            if row.state in LIVE:
                changed = self._compare(row, seen.get(row.ordinal), now)
                if changed != row:
                    self._records.put(changed)
                    self._count_end(row, changed)
        return self._records.pilots()

    def _cancel(self, pilot: Carried, why: str) -> None:
        if pilot.state is not CarriedState.GONE:
            log.warning("pilot %s (%s) is cancelled: %s", pilot.name, pilot.handle, why)
            self._carrier.stop(pilot, at_once=True)

    def _compare(self, row: PilotRow, pilot: Carried | None, now: float) -> PilotRow:
        """A row after what the engine says of its pilot."""
        if pilot is None:
            is_gone = now - max(row.last_seen, row.since) >= self._carrier.gone_s
            return replace(row, state=ENDED, why=row.why or "it is not listed any more") if is_gone else row
        ends_at = None if pilot.ends_at is None else pilot.ends_at.isoformat(timespec="seconds")
        node = self._carrier.node_of(pilot) or row.node
        seen = now if now - row.last_seen >= SEEN_S else row.last_seen
        ends_at = row.ends_at if _is_same(row.ends_at, pilot.ends_at) else ends_at
        row = replace(row, handle=pilot.handle, last_seen=seen, ends_at=ends_at, node=node, why=pilot.why)
        if pilot.state is CarriedState.GONE:
            return replace(row, state=ENDED)
        if row.state == ENDING or pilot.state is CarriedState.ENDING:
            return replace(row, state=ENDING)
        return replace(row, state=PENDING if pilot.state is CarriedState.PENDING else RUNNING)

    def _count_end(self, before: PilotRow, after: PilotRow) -> None:
        """Count a pilot that has ended before its worker reported, and pause the pool after several in a row."""
        if after.state != ENDED or after.was_ready or before.stops_since is not None:
            return
        if not after.handle:
            return  # this program was killed before the engine was asked
        pool = self._records.read_pool()
        assert pool is not None
        failed = pool.failed_starts + 1
        paused = pool.paused
        if failed >= MAX_FAILED_STARTS and not paused:
            paused = (
                f"{failed} pilots in a row ended before their worker reported; the last: {after.why or 'no reason'}"
            )
            log.error("pool %s is paused: %s", pool.name, paused)
        self._records.change_pool(failed_starts=failed, paused=paused)

    def _settle_ended(self, rows: Sequence[PilotRow], now: float) -> None:
        """Have the daemon know of each pilot that has ended: its token is refused, its node is forgotten."""
        in_use = {row.node for row in rows if row.state in LIVE and row.node}
        for row in rows:
            if row.state != ENDED:
                continue
            # Another pilot on the same host has taken the node over, with its jobs.
            left = not row.node or row.node in in_use or row.node not in self._daemon.known_nodes()
            if not left and now - row.last_seen < self._carrier.leaves_s:
                continue
            name = PilotName(pool=row.pool, ordinal=row.ordinal, generation=row.generation)
            if self._daemon.has_token(str(name)):
                row = replace(row, last_seen=now)  # noqa: PLW2901 - as it is from here on
                self._records.put(row)  # first: the answer to a revocation may be lost
                self._daemon.revoke_tokens(str(name))
            if left or (now - row.last_seen >= FORGET_S and self._daemon.forget(row.node)):
                self._records.put(replace(row, state=GONE))

    def _note_ready(self) -> None:
        new = [row for row in self._records.pilots() if row.state == RUNNING and row.node and not row.was_ready]
        ready = self._daemon.ready_nodes() if new else frozenset()
        for row in new:
            if row.node in ready:
                self._records.put(replace(row, was_ready=True))
                self._records.change_pool(failed_starts=0, failed_submissions=0)

    def _grow_or_shrink(self, pool: PoolRecord, live: list[PilotRow], listed: Sequence[Carried], now: float) -> None:
        waits = any(row.state in (SUBMITTING, PENDING) for row in live)
        queued = pool.least < pool.most and self._daemon.has_queue()
        idle = self._idle_rows(pool, live, queued, now)
        if len(live) < pool.least or (len(live) < pool.most and queued):
            starting = any(row.state == RUNNING and not row.was_ready for row in live)
            if not waits and not pool.paused and (len(live) < pool.least or not starting):
                self._start(pool, now)
            return
        if idle and len(live) > pool.least:
            self._stop_some(idle, len(live) - pool.least, listed, now)

    def _idle_rows(self, pool: PoolRecord, live: list[PilotRow], queued: bool, now: float) -> list[PilotRow]:
        """Those with a node that has been idle for long, while no one waits; last ordinals first.

        The record says since when each has been idle, so that rounds of several programs (`--once`) add up.
        """
        if pool.least == pool.most:
            if pool.idle_since:
                self._records.change_pool(idle_since={})
            return []
        idle = frozenset() if queued else self._daemon.idle_nodes()
        nodes = sorted(row.node for row in live if row.was_ready and row.node in idle)
        since = {node: pool.idle_since.get(node, now) for node in nodes}
        if since != pool.idle_since:
            self._records.change_pool(idle_since=since)
        rows = (row for row in reversed(live) if row.node in since)
        return [row for row in rows if now - since[row.node] >= pool.idle_s]

    def _start(self, pool: PoolRecord, now: float) -> None:
        """Submit the next pilot: token, row, submission, in this order."""
        rows = {row.ordinal: row for row in self._records.pilots()}
        wait_s = min(AGAIN_S, 2.0 ** (pool.failed_submissions + pool.failed_starts) - 1.0)
        if any(0.0 <= now - row.since < wait_s for row in rows.values()):  # the clock may have been set back
            return
        free = (ordinal for ordinal in range(pool.most) if ordinal not in rows or rows[ordinal].state == GONE)
        ordinal = next(free, None)
        if ordinal is None:
            return
        generation = rows[ordinal].generation + 1 if ordinal in rows else 1
        name = PilotName(pool=pool.name, ordinal=ordinal, generation=generation)
        token = self._daemon.make_token(str(name))
        row = PilotRow(
            pool=pool.name, ordinal=ordinal, generation=generation, state=SUBMITTING, last_seen=now, since=now
        )
        self._records.put(row)
        try:
            handle = self._carrier.start(name, token)
        except SubmitError as error:
            # Whether it was taken is found out by its name; this generation is not submitted again.
            self._note_failure(pool, row, str(error))
            return
        log.info("pilot %s is submitted: %s", name, handle)
        self._records.put(replace(row, handle=handle, state=PENDING))

    def _note_failure(self, pool: PoolRecord, row: PilotRow, error: str) -> None:
        failed = pool.failed_submissions + 1
        log.error("pilot %d of pool %s was not submitted: %s", row.ordinal, pool.name, error)
        self._records.put(replace(row, state=ENDED, why=error[:500]))
        paused = pool.paused
        if failed >= MAX_FAILED_SUBMISSIONS:
            paused = f"{failed} submissions in a row failed; the last: {error[:500]}"
            log.error("pool %s is paused: %s", pool.name, paused)
        self._records.change_pool(failed_submissions=failed, paused=paused)

    def _stop_some(self, rows: Sequence[PilotRow], most: int, listed: Sequence[Carried], now: float) -> None:
        """End so many of these pilots: those that wait first."""
        by_handle = {pilot.handle: pilot for pilot in listed}
        for row in sorted(rows, key=lambda one: one.state == RUNNING)[:most]:
            pilot = by_handle.get(row.handle)
            if pilot is None:
                continue  # not listed yet
            self._records.put(replace(row, state=ENDING, stops_since=now))
            self._carrier.stop(pilot, at_once=_waits(row, pilot))

    def _stop_late(self, listed: Sequence[Carried], now: float) -> None:
        """Ask again for what was asked for, and end at once what takes too long."""
        by_handle = {pilot.handle: pilot for pilot in listed}
        for row in self._records.pilots():
            pilot = by_handle.get(row.handle)
            if row.state == ENDING and row.stops_since is not None and pilot is not None:
                at_once = now - row.stops_since >= STOP_S or _waits(row, pilot)
                if at_once or pilot.state in (CarriedState.PENDING, CarriedState.RUNNING):
                    self._carrier.stop(pilot, at_once=at_once)

    def note_problem(self, problem: str) -> None:
        """Record for `status` why nothing was decided; empty where something was."""
        self._records.change_pool(problem=problem[:500])

    def __repr__(self) -> str:
        return f"Pool({self._records.pool!r})"


def _waits(row: PilotRow, pilot: Carried) -> bool:
    """True where a pilot has no node yet, and so nothing that could leave. One that does not answer may seem so."""
    return pilot.state is CarriedState.PENDING and not row.was_ready


def _is_same(known: str | None, ends_at: datetime | None) -> bool:
    """True where an end is the one that is known, but for what the answer of the engine took."""
    if known is None or ends_at is None:
        return known is None and ends_at is None
    return abs((datetime.fromisoformat(known) - ends_at).total_seconds()) < ENDS_S


def describe(pool: PoolRecord, rows: Sequence[PilotRow]) -> dict[str, Any]:
    """The pool and its pilots, for `gpulease fleet ... status --json`."""
    shown = ("ordinal", "generation", "state", "handle", "node", "ends_at", "was_ready", "why")
    return {
        "pool": pool.name,
        "least": pool.least,
        "most": pool.most,
        "down": pool.down,
        "paused": pool.paused or None,
        "problem": pool.problem or None,
        "pilots": [{name: getattr(row, name) for name in shown} for row in rows],
    }
