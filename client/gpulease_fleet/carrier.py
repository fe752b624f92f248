"""What every engine that carries workers must do, and nothing more."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from gpulease_protocol.lazy_dataclass import dataclass

NAME = re.compile(r"gpulease:([a-z0-9][a-z0-9-]{0,30}):(\d{1,4}):(\d{1,9})")
POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


class CarriedState(StrEnum):
    """How far the engine is with a pilot."""

    PENDING = "pending"
    """It waits for its allocation."""
    RUNNING = "running"
    """It has its allocation."""
    ENDING = "ending"
    """It is being ended."""
    GONE = "gone"
    """It has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotName:
    """The name of a pilot, by which it is found again."""

    pool: str
    ordinal: int
    """Its place in the pool, from 0."""
    generation: int
    """Which submission of that ordinal it is, from 1."""

    def __str__(self) -> str:
        return f"gpulease:{self.pool}:{self.ordinal}:{self.generation}"

    @classmethod
    def parse(cls, text: str) -> PilotName | None:
        """The name that a text is; None for any other."""
        found = NAME.fullmatch(text)
        return None if found is None else cls(pool=found[1], ordinal=int(found[2]), generation=int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A pilot as the engine lists it."""

    name: PilotName
    handle: str
    """The engine's own id of it."""
    state: CarriedState
    host: str = ""
    """The engine's name of the host; empty before it has one."""
    ends_at: datetime | None = None
    """When its allocation ends; None where no end is known."""
    why: str = ""
    """The engine's reason, in its own words; empty where it gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What `doctor` found."""

    ok: bool
    what: str
    """What was looked at, and what it is."""
    remedy: str = ""
    """What to change; empty where nothing is to be changed."""


class SubmitError(Exception):
    """The engine refused a pilot, in its own words. It may still have taken it: the generation is not used again."""


class EngineUnavailable(Exception):
    """The engine does not answer, so nothing is known of its pilots."""


class Carrier(Protocol):
    """An engine that carries workers. Each call blocks, for a bounded time."""

    engine: str
    """Its name."""
    gone_s: float
    """A pilot that is not listed for so long has ended. Seconds."""
    leaves_s: float
    """The worker of a pilot that has ended may say for so long that its node leaves; then it is refused. Seconds."""

    def doctor(self) -> list[Finding]:
        """What would go wrong on this cluster, before it does."""

    def start(self, name: PilotName, token: str) -> str:
        """Submit a pilot and return its handle. Raises `SubmitError`."""

    def list(self, pool: str) -> list[Carried]:
        """All pilots of a pool, those that have just ended too. Raises `EngineUnavailable`."""

    def stop(self, pilot: Carried, *, at_once: bool) -> None:
        """End a pilot: its worker leaves; `at_once`: whatever it does. Asking again does no harm."""

    def node_of(self, pilot: Carried) -> str:
        """The name of the node that it carries, as the daemon knows it; empty before it has a host."""
