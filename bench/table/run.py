"""Asks each question in a process of its own, waits for a quiet machine before it, and checks that it stayed quiet.

A question that other programs disturbed is asked once more. If they do so again, the run ends without its rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.table.load import MAX_FOREIGN_CORES, ForeignLoad, Usage, refusal, wait_for_quiet
from bench.table.machine import ROOT
from bench.table.questions import question
from bench.table.rows import Row, Target

ATTEMPTS = 2


class QuestionFailed(Exception):
    """A question ended with an error, which it has printed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one question."""

    name: str
    rows: Sequence[Row]
    foreign_cores: float
    """What other programs used meanwhile."""


def ask(name: str, *, quick: bool, patience_s: float | None) -> Measured:
    """Ask one question. `patience_s` is how long to wait for quiet; None asks whatever else runs. Raises ForeignLoad if
    other programs disturb it, and QuestionFailed."""
    for _ in range(ATTEMPTS):
        if patience_s is not None:
            wait_for_quiet(patience_s)
        before = Usage.now()
        rows = in_its_process(name, quick)
        cores = before.foreign_cores(Usage.now())
        if patience_s is None or cores <= MAX_FOREIGN_CORES:
            return Measured(name, rows, cores)
    raise ForeignLoad(refusal(cores))


def in_its_process(name: str, quick: bool) -> list[Row]:
    """The rows of one question, which a new process measures."""
    with tempfile.NamedTemporaryFile("r") as answer:
        command = [sys.executable, "-m", "bench", "--question", name, answer.name, *(["--quick"] if quick else [])]
        code = await_end(subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr))
        if code != 0:
            raise QuestionFailed(f"The question {name} ended with exit code {code}.")
        return [row_of(row) for row in json.load(answer)]


def await_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and for every orphan that it left to this one, so that their time is known as ours."""
    code = process.wait()
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                return code
        except ChildProcessError:
            return code


def answer(name: str, file: Path, quick: bool) -> None:
    """In the process of a question: measure, and write its rows."""
    file.write_text(json.dumps([asdict(row) for row in question(name)(quick)]))


def row_of(fields: dict[str, object]) -> Row:
    """A row from its JSON."""
    target = fields.pop("target")
    return Row(**fields, target=Target(**target) if isinstance(target, dict) else None)  # type: ignore[arg-type]
