"""`make bench`: measures each goal for speed beside its limit or peer, and prints a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.table import machine, run
from bench.table.load import PATIENCE_S, ForeignLoad, become_subreaper, foreign_cores_now, wait_for_quiet
from bench.table.questions import QUESTIONS, print_details
from bench.table.rows import HEADINGS, markdown

UNMEASURED, REFUSED = 1, 2


def main(words: Sequence[str] | None = None) -> int:
    """Print the table. 0; 1 if a question failed; 2 if other programs use too much of the machine."""
    options = parser().parse_args(words)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as for an installed program: Python keeps what it has compiled
    if options.question:
        run.answer(options.question[0], Path(options.question[1]), options.quick)
        return 0
    if options.details:
        print_details()
        return 0
    become_subreaper()
    return table(options)


def table(options: argparse.Namespace) -> int:
    """Ask the questions one after the other, and print each answer when it is there."""
    described = machine.describe()
    code, found = 0, []
    patience_s = None if options.beside_load else options.patience_s
    try:
        foreign_cores = foreign_cores_now() if options.beside_load else wait_for_quiet(options.patience_s)
        if not options.json:
            print(machine.heading(described, foreign_cores, beside_load=options.beside_load, quick=options.quick))
            print(f"\n{markdown([])}", flush=True)
        for name in options.only or QUESTIONS:
            try:
                found.append(run.ask(name, quick=options.quick, patience_s=patience_s))
            except run.QuestionFailed as failed:
                print(failed, file=sys.stderr)
                code = UNMEASURED
                continue
            if not options.json:
                print(markdown(found[-1].rows, heading=False), flush=True)
    except ForeignLoad as refused:
        print(refused, file=sys.stderr)
        return REFUSED
    if found and not options.json:
        most = max(one.foreign_cores for one in found)
        print(f"\nWhile they were asked, other programs used {most:.2f} of a core at most.")
    if options.json:
        questions = {
            one.name: {"foreign_cores": one.foreign_cores, "rows": [asdict(row) for row in one.rows]} for one in found
        }
        sys.stdout.write(json.dumps({"machine": described, "beside_load": options.beside_load, "questions": questions}))
    return code


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("python -m bench", description=__doc__, epilog=f"Columns: {', '.join(HEADINGS)}.")
    found.add_argument("--only", action="append", choices=QUESTIONS, help="ask this question only; may be repeated")
    found.add_argument("--quick", action="store_true", help="few and short rounds: to see that it runs")
    found.add_argument("--json", action="store_true", help="print JSON instead of the table")
    found.add_argument("--beside-load", action="store_true",
                       help="measure whatever else runs; the heading says that nothing counts then")  # fmt: skip
    found.add_argument("--patience-s", type=float, default=PATIENCE_S, metavar="S",
                       help="how long to wait for a quiet machine before each question (%(default)g)")  # fmt: skip
    found.add_argument("--details", action="store_true", help="print the tables of questions without a target instead")
    found.add_argument("--question", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    return found


if __name__ == "__main__":
    sys.exit(main())
