"""The matrix of docs/security.md, "What another user can do": every cell has a test that exists, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ATTACKS = ROOT / "tests" / "attack"
WAYS = ["start", "stop", "slow", "read", "impersonate", "pin"]
MEANS = ["REST routes", "socket and port", "files", "`/proc`", "signals", "keyring", "cgroups", "devices", "logs"]
SECTION = (
    (ROOT / "docs" / "security.md").read_text().partition("\n## What another user can do\n")[2].partition("\n## ")[0]
)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]
ENTRIES = dict(re.findall(r"^- ([TR]\d+): ((?:.*\n?)(?:  .*\n?)*)", SECTION, re.MULTILINE))
NAMED = {code: re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text) for code, text in ENTRIES.items()}


def names_of_tests(path: Path) -> set[str]:
    """The names of the tests in a file."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, definitions) and node.name.startswith("test_")
    }


def test_every_way_of_harm_by_every_means_has_a_test_or_a_reason() -> None:
    head, _, *rows = ROWS
    assert head == ["by", *WAYS]
    assert [row[0] for row in rows] == MEANS
    for name, *cells in rows:
        assert len(cells) == len(WAYS), name
        for way, cell in zip(WAYS, cells, strict=True):
            codes = cell.split()
            assert codes, f"{way} by {name}: no test and no reason"
            assert set(codes) <= set(ENTRIES), f"{way} by {name}: {cell} is not explained below the table"


def test_every_test_that_the_matrix_names_exists() -> None:
    assert [code for code, tests in NAMED.items() if code.startswith("T") and not tests] == []
    named = {pair for tests in NAMED.values() for pair in tests}
    missing = [f"{path}::{test}" for path, test in named if test not in names_of_tests(ROOT / path)]
    assert missing == []


def test_every_entry_stands_in_a_cell_and_every_attack_in_an_entry() -> None:
    cells = {code for row in ROWS[2:] for cell in row[1:] for code in cell.split()}
    assert sorted(set(ENTRIES) - cells) == []
    named = {test for tests in NAMED.values() for _, test in tests}
    attacks = {test for path in ATTACKS.glob("test_*.py") for test in names_of_tests(path)}
    assert len(attacks) > 30
    assert sorted(attacks - named) == [], "name it in the matrix of docs/security.md"
