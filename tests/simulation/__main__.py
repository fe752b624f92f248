"""`python -m tests.simulation SEED [--steps N] [--mutation NAME]`: run one seed and say what the checker found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .mutations import MUTATIONS, mutated
from .world import Outcome, World

RAM = Path("/dev/shm")


def simulate(seed: int, steps: int = 10_000) -> Outcome:
    """One run, on a database in memory where there is a place for it: what a power cut leaves is not played here."""
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as directory:
        return World(seed, steps, Path(directory)).run()


def main() -> int:
    """Exit status 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mutation", choices=MUTATIONS, help="put this fault into the daemon")
    parser.add_argument("--trace", type=Path, help="write every step to this file")
    asked = parser.parse_args()
    begun_s = time.monotonic()
    with mutated(asked.mutation):
        outcome = simulate(asked.seed, asked.steps)
    if asked.trace:
        asked.trace.write_text("\n".join(outcome.trace) + "\n")
    print(f"seed {asked.seed}: {len(outcome.trace)} steps, {len(outcome.log)} events, {outcome.digest[:16]}", end="")
    print(f", {outcome.count('daemon killed')} kills, {time.monotonic() - begun_s:.1f} s")
    print("\n".join(outcome.complaints) or "every promise was kept")
    return bool(outcome.complaints)


if __name__ == "__main__":
    sys.exit(main())
