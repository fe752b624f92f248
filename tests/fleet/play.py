"""An engine and a daemon that a test plays, and which may break at any step: the pool goes on from its records."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpulease_fleet.carrier import Carried, CarriedState, EngineUnavailable, Finding, PilotName, SubmitError
from gpulease_fleet.pool import LIVE, Pool
from gpulease_fleet.records import PilotRow, PoolRecord, Records
from gpulease_protocol.errors import Unavailable

GONE_S = 60.0
NOW = 1_800_000_000.0


class Crash(BaseException):
    """The program is killed here."""


@dataclass
class World:
    """The engine, the daemon, and the clock."""

    place: Path
    hosts: int = 8
    now: float = NOW
    submitted: Counter[str] = field(default_factory=Counter)
    """By name: how many times it was taken."""
    engine: dict[str, Carried] = field(default_factory=dict)
    """By handle."""
    tokens: dict[str, str] = field(default_factory=dict)
    """By secret: its note."""
    reports: set[str] = field(default_factory=set)
    """Nodes whose worker reports."""
    known: set[str] = field(default_factory=set)
    forgotten: list[str] = field(default_factory=list)
    waits: bool = False
    """Whether a request waits in the daemon's queue."""
    busy: set[str] = field(default_factory=set)
    """Nodes with a lease."""
    refuses: str = ""
    """Why the engine takes no pilot."""
    away: bool = False
    """The engine does not answer."""
    daemon_away: bool = False
    crash_at: int | None = None
    """At which step from now the program is killed; None: at none."""
    leaves_s: float = 0.0
    late_list: bool = False
    """Whether the engine hides what it has just taken from its list."""
    handles: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def step(self) -> None:
        """One effect begins or has ended: the program may be killed here."""
        if self.crash_at is not None:
            self.crash_at -= 1
            if self.crash_at < 0:
                self.crash_at = None
                raise Crash

    def up(self, least: int, most: int | None = None, **what: object) -> None:
        """Ask for a pool of this size."""
        records = FastRecords(self.place, "p")
        known = records.read_pool() or PoolRecord(name="p", options={})
        records.put_pool(replace(known, least=least, most=least if most is None else most, **what))  # type: ignore[arg-type]
        records.close()

    def tick(self, seconds: float = 1.0) -> bool:
        """A round of a program that has just been started; False if it was killed or nothing was decided."""
        self.now += seconds
        records = CrashingRecords(self.place, "p", self)
        try:
            Pool(records, Engine(self), Daemon(self)).tick(self.now)
        except (Crash, EngineUnavailable, Unavailable):
            return False
        finally:
            records.close()
        return True

    def rounds(self, count: int) -> None:
        """Rounds of one program, in which the engine gives pilots hosts and their workers report."""
        records = FastRecords(self.place, "p")
        pool = Pool(records, Engine(self), Daemon(self))
        for _ in range(count):
            self.now += 1.0
            pool.tick(self.now)
            self.advance()
        records.close()

    def advance(self) -> None:
        """The engine gives what waits a host, as far as there are any, and their workers report."""
        for handle, pilot in sorted(self.engine.items()):
            taken = {one.host for one in self.engine.values() if one.state is CarriedState.RUNNING}
            free = [host for host in (f"n{number}" for number in range(self.hosts)) if host not in taken]
            if pilot.state is CarriedState.PENDING and free:
                ends_at = datetime.fromtimestamp(self.now, UTC) + timedelta(hours=24)
                self.engine[handle] = replace(pilot, state=CarriedState.RUNNING, host=free[0], ends_at=ends_at)
            elif pilot.state is CarriedState.RUNNING:
                self.reports.add(pilot.host)
                self.known.add(pilot.host)
            elif pilot.state is CarriedState.ENDING:
                self.end(handle, left=True)

    def end(self, handle: str, *, left: bool = False, why: str = "CANCELLED") -> None:
        """A pilot ends, after its node has left or without that."""
        pilot = self.engine[handle]
        self.engine[handle] = replace(pilot, state=CarriedState.GONE, why=why)
        self.reports.discard(pilot.host)
        if left:
            self.known.discard(pilot.host)

    def alive(self) -> list[Carried]:
        """The pilots that the engine has."""
        return [pilot for pilot in self.engine.values() if pilot.state is not CarriedState.GONE]

    def rows(self) -> list[PilotRow]:
        """What is on record."""
        records = FastRecords(self.place, "p")
        found = records.pilots()
        records.close()
        return found

    def pool(self) -> PoolRecord:
        """The pool that is on record."""
        records = FastRecords(self.place, "p")
        found = records.read_pool()
        records.close()
        assert found is not None
        return found

    def check(self) -> None:
        """What must always hold."""
        twice = [name for name, times in self.submitted.items() if times > 1]
        assert not twice, f"submitted twice: {twice}"
        for row in self.rows():
            names = [one.name.generation for one in self.alive() if one.name.ordinal == row.ordinal]
            assert all(generation <= row.generation for generation in names), "a pilot is newer than its row"
        known = {(row.ordinal, row.generation) for row in self.rows() if row.state in LIVE}
        waiting = [one for one in self.alive() if one.state is CarriedState.PENDING]
        assert sum((one.name.ordinal, one.name.generation) in known for one in waiting) <= 1, "one waits at a time"


class FastRecords(Records):
    """Without fsync: what is killed in these tests is a program, not the host."""

    SYNCHRONOUS = "OFF"


class CrashingRecords(FastRecords):
    """Records of a program that may be killed before and after each write."""

    def __init__(self, directory: Path, pool: str, world: World) -> None:
        super().__init__(directory, pool)
        self._world = world

    def put(self, row: PilotRow) -> None:
        self._world.step()
        super().put(row)
        self._world.step()

    def change_pool(self, **changes: Any) -> PoolRecord:
        self._world.step()
        changed = super().change_pool(**changes)
        self._world.step()
        return changed


@dataclass
class Engine:
    """The engine, as a pool sees it."""

    world: World
    engine: str = "play"
    gone_s: float = GONE_S

    @property
    def leaves_s(self) -> float:
        return self.world.leaves_s

    def doctor(self) -> list[Finding]:
        return []

    def start(self, name: PilotName, token: str) -> str:
        world = self.world
        world.step()
        assert world.tokens[token] == str(name), "each pilot has a token of its own"
        if world.refuses:
            raise SubmitError(world.refuses)
        handle = f"{next(world.handles):04d}"
        world.submitted[str(name)] += 1
        world.engine[handle] = Carried(name=name, handle=handle, state=CarriedState.PENDING)
        world.step()
        return handle

    def list(self, pool: str) -> list[Carried]:
        if self.world.away:
            raise EngineUnavailable("it is away")
        newest = max(self.world.engine, default="")
        return [one for handle, one in self.world.engine.items() if not (self.world.late_list and handle == newest)]

    def stop(self, pilot: Carried, *, at_once: bool) -> None:
        self.world.step()
        known = self.world.engine[pilot.handle]
        if known.state is CarriedState.GONE:
            return
        if at_once:
            self.world.end(pilot.handle)
        else:
            self.world.engine[pilot.handle] = replace(known, state=CarriedState.ENDING)
        self.world.step()

    def node_of(self, pilot: Carried) -> str:
        return pilot.host


@dataclass
class Daemon:
    """The daemon, as a pool sees it."""

    world: World

    def _answer(self) -> None:
        if self.world.daemon_away:
            raise Unavailable("the daemon is away")

    def ready_nodes(self) -> frozenset[str]:
        self._answer()
        return frozenset(self.world.reports)

    def known_nodes(self) -> frozenset[str]:
        self._answer()
        return frozenset(self.world.known)

    def idle_nodes(self) -> frozenset[str]:
        self._answer()
        return frozenset(self.world.reports - self.world.busy)

    def has_queue(self) -> bool:
        self._answer()
        return self.world.waits

    def make_token(self, note: str) -> str:
        self._answer()
        self.world.step()
        secret = f"secret-{len(self.world.tokens)}-{note}"
        self.world.tokens[secret] = note
        self.world.step()
        return secret

    def has_token(self, note: str) -> bool:
        self._answer()
        return note in self.world.tokens.values()

    def revoke_tokens(self, note: str) -> None:
        self._answer()
        self.world.step()
        self.world.tokens = {secret: known for secret, known in self.world.tokens.items() if known != note}
        self.world.step()

    def forget(self, node: str) -> bool:
        self._answer()
        if node in self.world.reports:
            return False
        self.world.known.discard(node)
        self.world.forgotten.append(node)
        return True
