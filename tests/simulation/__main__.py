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


def simulate(
    seed: int,
    steps: int = 10_000,
    url: str | None = None,
    *,
    gangs: bool = False,
    priorities: bool = False,
    limits: bool = False,
    budgets: bool = False,
    token_budgets: bool = False,
    fair_share: bool = False,
    shares: bool = False,
    reservations: bool = False,
    preemption: bool = False,
    jobs: bool = False,
    reclaim: bool = False,
    crowd: bool = False,
    explains: bool = False,
) -> Outcome:
    """One run, on this empty database or on one of its own; with gangs, priorities, limits, budgets, token
    budgets, fair share, shares, reservations, preemption, jobs or reclaim where that is said, or a crowd; and
    explanations of the order."""
    with contextlib.nullcontext(url) if url else fresh_sqlite() as place:
        clients = 24 if priorities else 18 if fair_share else 12 if gangs or reservations else 6
        clients = 12 if shares or budgets or token_budgets else clients
        clients = 6 if jobs else 8 if preemption else 10 if reclaim else clients
        how = {"gangs": gangs, "priorities": priorities, "limits": limits, "fair_share": fair_share}
        clients = 16 if crowd else clients
        how |= {"reservations": reservations, "preemption": preemption, "reclaim": reclaim, "crowd": crowd}
        how |= {
            "shares": shares,
            "budgets": budgets,
            "explains": explains,
            "jobs": jobs,
            "token_budgets": token_budgets,
        }
        return World(seed, steps, place, clients=clients, **how).run()


def main() -> int:
    """Exit status 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mutation", choices=MUTATIONS, help="put this fault into the daemon")
    parser.add_argument("--gangs", action="store_true", help="more nodes, and requests for several of them")
    parser.add_argument("--priorities", action="store_true", help="more clients, and requests of each priority")
    parser.add_argument("--limits", action="store_true", help="an administrator sets and removes limits")
    parser.add_argument("--budgets", action="store_true", help="limits of a token and of GPU-hours, too")
    parser.add_argument("--token-budgets", action="store_true", help="that token has a budget of its own, too")
    parser.add_argument("--fair-share", action="store_true", help="two users, ordered by what they have used")
    parser.add_argument("--shares", action="store_true", help="a group and a user, ordered by what they have used")
    parser.add_argument("--reservations", action="store_true", help="an administrator reserves GPUs, and cancels that")
    parser.add_argument("--preemption", action="store_true", help="leases that are preemptible end for others")
    parser.add_argument("--jobs", action="store_true", help="jobs that are preemptible end for others, too")
    parser.add_argument("--reclaim", action="store_true", help="idle leases of priority interactive end for others")
    parser.add_argument("--crowd", action="store_true", help="few GPUs for many, and all that lets one pass another")
    parser.add_argument("--explains", action="store_true", help="someone looks what those who wait are told")
    parser.add_argument("--trace", type=Path, help="write every step to this file")
    asked = parser.parse_args()
    begun_s = time.monotonic()
    with mutated(asked.mutation):
        names = (
            "gangs",
            "priorities",
            "limits",
            "budgets",
            "token_budgets",
            "fair_share",
            "shares",
            "reservations",
            "preemption",
            "jobs",
            "reclaim",
            "crowd",
            "explains",
        )
        how = {name: getattr(asked, name) for name in names}
        outcome = simulate(asked.seed, asked.steps, **how)
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
