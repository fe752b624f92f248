"""`python -m tests.simulation SEED [--steps N] [--mutation NAME]`: run one seed and say what the checker found."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpulease_server.store.database import upgrade
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.world import Outcome, World

RAM = Path("/dev/shm")
MODES = {
    "gangs": "more nodes, and requests for several of them",
    "priorities": "more clients, and requests of each priority",
    "limits": "an administrator sets and removes limits",
    "budgets": "limits of a token and of GPU-hours, too",
    "token_budgets": "that token has a budget of its own, too",
    "fair_share": "two users, ordered by what they have used",
    "shares": "a group and a user, ordered by what they have used",
    "reservations": "an administrator reserves GPUs, and cancels that",
    "preemption": "leases that are preemptible end for others",
    "jobs": "jobs that are preemptible end for others, too",
    "reclaim": "idle leases of priority interactive end for others",
    "crowd": "few GPUs for many, and all that lets one pass another",
    "explains": "someone looks what those who wait are told",
}
"""What a run has beside leases of one or more GPUs, by name."""


@contextlib.contextmanager
def fresh_sqlite() -> Iterator[str]:
    """The URL of a database without any rows, in memory where that can be: no power cut is played here."""
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as directory:
        file = Path(directory) / "ledger.db"
        file.write_bytes(_empty_ledger())
        yield f"sqlite:///{file}"


@functools.cache
def _empty_ledger() -> bytes:
    """A database of the newest schema, made once in each process, because its migrations take long."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "ledger.db"
        upgrade(f"sqlite:///{file}")
        return file.read_bytes()


def simulate(seed: int, steps: int = 10_000, url: str | None = None, **modes: bool) -> Outcome:
    """One run, on this empty database or on one of its own, in these modes (`MODES`)."""
    on = {name for name, is_on in modes.items() if is_on}
    with contextlib.nullcontext(url) if url else fresh_sqlite() as place:
        clients = (
            24 if "priorities" in on else 18 if "fair_share" in on else 12 if on & {"gangs", "reservations"} else 6
        )
        clients = 12 if on & {"shares", "budgets", "token_budgets"} else clients
        clients = 6 if "jobs" in on else 8 if "preemption" in on else 10 if "reclaim" in on else clients
        clients = 16 if "crowd" in on else clients
        return World(seed, steps, place, clients=clients, **modes).run()


def main() -> int:
    """Exit status 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mutation", choices=MUTATIONS, help="put this fault into the daemon")
    for name, what in MODES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=what)
    parser.add_argument("--trace", type=Path, help="write every step to this file")
    asked = parser.parse_args()
    begun_s = time.monotonic()
    with mutated(asked.mutation):
        outcome = simulate(asked.seed, asked.steps, **{name: getattr(asked, name) for name in MODES})
    if asked.trace:
        asked.trace.write_text("\n".join(outcome.trace) + "\n")
    print(f"seed {asked.seed}: {len(outcome.trace)} steps, {len(outcome.log)} events, {outcome.digest[:16]}", end="")
    print(f", {outcome.count('daemon killed')} kills, {time.monotonic() - begun_s:.1f} s")
    if asked.gangs:
        print(f"{len(outcome.gangs())} gangs were granted")
    print("\n".join(outcome.complaints) or "every promise was kept")
    return bool(outcome.complaints)


if __name__ == "__main__":
    sys.exit(main())
