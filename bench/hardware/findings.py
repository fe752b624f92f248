"""The findings of a step: rows, tables of times, and what in gpulease relies on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from gpulease_worker.probe.nvml_binding import GpuFailed, LibraryFailed
from gpulease_worker.probe.probe_protocol import ReadingFailed
from tests.gpu.subjects import SubjectFailed, SubjectHangs

HEADER = ("step", "what was asked", "what was found", "expected", "verdict", "gpulease relies on it")


class Verdict(StrEnum):
    """The verdict of a row."""

    AS_EXPECTED = "as expected"
    NOTED = "noted"
    """A fact without an expectation."""
    DIFFERS = "differs"
    """Not as expected, and gpulease does not rely on it."""
    NOT_RUN = "not run"
    CONTRADICTS = "**CONTRADICTS**"
    """Not as expected, and gpulease relies on it."""
    HUNG = "**HUNG**"
    BROKE = "**BROKE**"


GRAVE = (Verdict.CONTRADICTS, Verdict.HUNG, Verdict.BROKE)
"""Verdicts that make the command's exit code 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report."""

    step: str
    """Letter of the step."""
    asked: str
    """The question."""
    found: str
    """The answer of this machine."""
    expected: str = ""
    """The answer that was expected."""
    verdict: Verdict
    """Whether they agree."""
    relies: str = ""
    """What in gpulease relies on the expected answer; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A table below the report."""

    title: str
    """Its title."""
    header: tuple[str, ...]
    """Column names."""
    rows: tuple[tuple[str, ...], ...]
    """Its rows."""


class Report:
    """Writes the findings of a step to a file, each as soon as it is known."""

    def __init__(self, step: str, path: Path) -> None:
        self._step, self._path = step, path

    def note(self, asked: str, found: object) -> None:
        """Write a fact."""
        self._row(asked, str(found), "", Verdict.NOTED, "")

    def judge(self, asked: str, found: object, expected: str, *, holds: bool, relies: str = "") -> None:
        """Write an answer, and whether it is the expected one."""
        wrong = Verdict.CONTRADICTS if relies else Verdict.DIFFERS
        self._row(asked, str(found), expected, Verdict.AS_EXPECTED if holds else wrong, relies)

    def not_run(self, asked: str, why: object) -> None:
        """Write that a question cannot be answered here."""
        self._row(asked, f"not run: {why}", "", Verdict.NOT_RUN, "")

    def times(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of times."""
        if not rows:
            return
        found = Times(title=title, header=tuple(header), rows=tuple(tuple(row) for row in rows))
        self._write({"times": asdict(found)})

    @contextmanager
    def asking(self, asked: str) -> Iterator[None]:
        """The duration of a question. If it cannot be asked or does not return, that becomes its row."""
        self._write({"asking": asked})
        try:
            yield
        except SubjectHangs as hangs:
            self._row(asked, str(hangs), "an answer", Verdict.HUNG, "")
        except (SubjectFailed, GpuFailed, LibraryFailed, ReadingFailed) as failed:
            self.not_run(asked, failed)

    def _row(self, asked: str, found: str, expected: str, verdict: Verdict, relies: str) -> None:
        row = Row(step=self._step, asked=asked, found=found, expected=expected, verdict=verdict, relies=relies)
        self._write({"row": asdict(row)})

    def _write(self, what: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def read(path: Path) -> tuple[list[Row | Times], str]:
    """What a step has written, and its last question."""
    found: list[Row | Times] = []
    asking = "its beginning"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:  # the step was killed while writing it
            continue
        if "row" in one:
            found.append(Row(**one["row"] | {"verdict": Verdict(one["row"]["verdict"])}))
        elif "times" in one:
            rows = tuple(tuple(row) for row in one["times"]["rows"])
            found.append(Times(title=one["times"]["title"], header=tuple(one["times"]["header"]), rows=rows))
        else:
            asking = one["asking"]
    return found, asking


def line(words: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(' '.join(word.split()).replace('|', chr(92) + '|') for word in words)} |"


def rule(columns: int) -> str:
    """The line below a table's header."""
    return f"|{'---|' * columns}"


def shown(row: Row) -> str:
    """A row of the report."""
    relies = f"yes: {row.relies}" if row.relies else "no" if row.expected else ""
    return line((row.step, row.asked, row.found, row.expected, row.verdict.value, relies))


def table(times: Times) -> str:
    """A table of times, under its title."""
    rows = "\n".join(line(row) for row in times.rows)
    return f"\n{times.title}:\n\n{line(times.header)}\n{rule(len(times.header))}\n{rows}"
