"""Each promise of `tests/PROMISES.md`, each command and each endpoint has a test in the fast lane."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_cli.program import PROGRAM

TESTS = Path(__file__).parents[1]
PROMISES = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (TESTS / "PROMISES.md").read_text(), re.MULTILINE)
COMMANDS_RUN_IN = ("fleet", "cli", "system")


def is_fast(source: str, test: str) -> bool:
    """True when neither the file nor the test itself is marked for another lane."""
    whole_file = re.search(r"^pytestmark = .*mark\.(slow|soak)", source, re.MULTILINE)
    definition = re.search(rf"((?:^@.*\n(?:^[ )\]].*\n)*)*)^def {test}\(", source, re.MULTILINE)
    return whole_file is None and definition is not None and "mark.slow" not in definition[1]


def test_every_promise_is_listed_once() -> None:
    numbers = [int(number) for number, _ in PROMISES]
    assert numbers == list(range(1, 17))


@pytest.mark.parametrize(("number", "tests"), PROMISES)
def test_a_promise_has_tests_in_the_fast_lane(number: str, tests: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", tests)
    assert named
    for path, test in named:
        source = (TESTS.parent / path).read_text()
        assert f"def {test}(" in source, f"promise {number}: there is no {path}::{test}"
        assert is_fast(source, test), f"promise {number}: {path}::{test} is not in the fast lane"


def commands(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    if not hasattr(command, "commands"):
        yield path
        return
    for name, inner in command.commands.items():
        yield from commands(inner, *path, name)


def fast_sources() -> str:
    """All test files of the fast lane in which the program is run."""
    files = (path for folder in COMMANDS_RUN_IN for path in sorted((TESTS / folder).glob("test_*.py")))
    sources = (path.read_text() for path in [*files, TESTS / "daemon.py", TESTS / "cli" / "conftest.py"])
    return "\n".join(text for text in sources if not re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE))


def test_every_command_is_run_in_the_fast_lane() -> None:
    source = fast_sources()
    missing = [
        " ".join(path)
        for path in commands(PROGRAM)
        if not re.search(r",?\s*".join(f'["\\[( ]{re.escape(word)}["\\]) ]' for word in path), source)
    ]
    assert missing == []
