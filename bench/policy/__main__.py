"""`python -m bench.policy`: validates the replay, then compares policies, and prints tables in Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.policy import traces
from bench.policy.comparison import HEADS, POLICIES, Workload, results, row
from bench.policy.validation import checks


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables. 0."""
    options = parser().parse_args(words)
    pollux_files = sorted(options.pollux.glob("workload-?.csv")) if options.pollux else []
    gavel_files = sorted(options.gavel.glob("*.trace")) if options.gavel else []
    for name, given in (("--pollux", pollux_files), ("--philly", options.philly), ("--gavel", gavel_files)):
        if not given:
            print(f"Not run: {name} (its trace was not given).", file=sys.stderr)
    if not options.only_compare:
        print("\n| question | replay or model | beside it | verdict |\n|---|---|---|---|", flush=True)
        for check in checks(pollux_files, poisson_requests=10_000 if options.quick else 200_000):
            print("| " + " | ".join(check) + " |", flush=True)
    for workload in workloads(options, pollux_files, gavel_files):
        users = len({one.user for one in workload.requests})
        print(f"\n**{workload.name}**: {len(workload.requests):,} requests of {users} users,"
              f" {workload.nodes} x {workload.gpus} GPUs\n")  # fmt: skip
        print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
        for result in results(workload, options.policy) if options.policy else results(workload):
            print("| " + " | ".join(row(result)) + " |", flush=True)
    return 0


def workloads(options: argparse.Namespace, pollux: Sequence[Path], gavel: Sequence[Path]) -> Iterator[Workload]:
    """Those of which the traces are there."""
    if not options.only or "tiresias" in options.only:
        yield Workload("Tiresias' 60 jobs (users synthetic)", traces.tiresias(), 4, 4)
    if pollux and (not options.only or "pollux" in options.only):
        file = next((one for one in pollux if one.stem == "workload-6"), pollux[0])
        name = f"Pollux {file.stem} (durations from published completions, users synthetic)"
        yield Workload(name, traces.pollux(file), 16, 4)
    if gavel and (not options.only or "gavel" in options.only):
        name = "Gavel, virtual clusters as users (durations synthetic)"
        yield Workload(name, traces.gavel(gavel), 8, 8)
    if options.philly and (not options.only or "philly" in options.only):
        requests = traces.philly(options.philly)[: options.most]
        yield Workload("Philly, virtual clusters as users", requests, options.philly_nodes, 8)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("python -m bench.policy", description=__doc__)
    found.add_argument("--pollux", type=Path, metavar="DIR", help="directory with workload-1.csv to workload-8.csv")
    found.add_argument(
        "--gavel", type=Path, metavar="DIR", help="directory with *.trace of scheduler/traces/msr/seed=0"
    )
    found.add_argument("--philly", metavar="FILE|URL", help="philly.csv of Pollux' artifact, or its https address")
    found.add_argument("--philly-nodes", type=int, default=64, metavar="N", help="nodes of 8 GPUs (%(default)s)")
    found.add_argument("--most", type=int, metavar="N", help="only the first N requests of Philly")
    found.add_argument("--policy", action="append", choices=POLICIES, help="only this policy; may be repeated")
    found.add_argument("--only", action="append", choices=("tiresias", "pollux", "gavel", "philly"),
                       help="compare on this workload only; may be repeated")  # fmt: skip
    found.add_argument("--only-compare", action="store_true", help="leave out the validation")
    found.add_argument("--quick", action="store_true", help="few requests in the validation: to see that it runs")
    return found


if __name__ == "__main__":
    sys.exit(main())
