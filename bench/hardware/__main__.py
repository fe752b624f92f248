"""`python -m bench.hardware`: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime

from bench.hardware import findings
from bench.hardware.checks import CHECKS, Check
from bench.hardware.findings import GRAVE, HEADER, Row, Times, Verdict
from bench.hardware.run import Survey, survey, take
from tests.gpu.subjects import torch_problem

WITHIN_S = 570.0
"""Time for all steps; those that have not started by then are reported as not run."""
NO_GPU = 2


def main() -> int:
    """Take the steps, print their rows as they arrive, and the tables of times at the end."""
    begun_s, options = time.monotonic(), _options()
    seen = survey(options.gpu)
    if seen.reading.problem is not None:
        print(f"Nothing to check: {seen.reading.problem}")
        return NO_GPU
    seen = replace(seen, torch=torch_problem())
    _introduce(seen)
    rows: list[Row] = []
    times: list[Times] = []
    for check in _chosen(options):
        print(f"{check.letter}: {check.title} ...", file=sys.stderr, flush=True)
        left_s = options.within_s - (time.monotonic() - begun_s)
        for found in take(check, seen, quick=options.quick, left_s=left_s):
            if isinstance(found, Times):
                times.append(found)
                continue
            rows.append(found)
            print(findings.shown(found), flush=True)
    for table in times:
        print(findings.table(table))
    return _conclude(rows, time.monotonic() - begun_s)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.hardware", description="What gpulease relies on, on this machine."
    )
    parser.add_argument("--quick", action="store_true", help="shorter measurements: to see that it runs")
    parser.add_argument("--only", type=_letters, default=None, help="these steps alone, e.g. A,E", metavar="LETTERS")
    parser.add_argument("--gpu", default=None, help="use this GPU, by UUID or index, if it is unused")
    parser.add_argument("--xid", action="store_true", help="also M, which leaves an Xid 31 in the host's log")
    parser.add_argument("--within-s", type=float, default=WITHIN_S, help="seconds for all of it", metavar="SECONDS")
    return parser.parse_args()


def _letters(text: str) -> set[str]:
    letters = {letter.strip().upper() for letter in text.split(",")}
    if strange := letters - {check.letter for check in CHECKS}:
        raise argparse.ArgumentTypeError(f"there is no step {', '.join(sorted(strange))}")
    return letters


def _chosen(options: argparse.Namespace) -> list[Check]:
    return [
        check
        for check in CHECKS
        if (options.only is None or check.letter in options.only) and (options.xid or not check.told_only)
    ]


def _introduce(seen: Survey) -> None:
    """Print what is known before the first step, and the table's header."""
    names = sorted({gpu.name or "GPU" for gpu in seen.reading.gpus})
    at = f"{datetime.now(UTC):%Y-%m-%d}"
    print(f"{len(seen.reading.gpus)} x {', '.join(names)}, driver {seen.reading.driver_version}, {at}.\n")
    for uuid, why in seen.left_alone.items():
        print(f"Left alone: {uuid}, {why}.\n")
    print(f"Used: {'no GPU, because none is unused' if seen.gpu is None else seen.gpu.uuid}.\n")
    print(f"{findings.line(HEADER)}\n{findings.rule(len(HEADER))}", flush=True)


def _conclude(rows: list[Row], took_s: float) -> int:
    """One line for those who do not read the table, and the exit code."""
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict.value.strip('*')}" for verdict, count in counts.items() if count)
    print(f"\n{len(rows)} rows in {took_s:.0f} s: {told}.")
    return 1 if any(counts[verdict] for verdict in GRAVE) else 0


if __name__ == "__main__":
    sys.exit(main())
