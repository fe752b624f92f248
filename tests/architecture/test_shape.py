"""The shape that keeps the code easy to change: imports, sizes and names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("protocol", "client", "worker", "server", "examples", "migrations", "bench")
MODULE_LINES, FUNCTION_LINES = 450, 70
VAGUE = {"manager", "handler", "helper", "helpers", "processor", "util", "utils", "common", "base", "info"}
"""Words that name anything; a name says what a thing is, in the field's words."""
OF_OTHERS = {"get_provisioner_info", "ArgumentHandler", "NullHandler", "StreamHandler"}
"""Names that a library gives."""


def modules() -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def words(name: str) -> set[str]:
    """`LeaseManager` and `lease_manager` are both lease and manager."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def test_imports_go_downward_only() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    ran = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 broken" in ran.stdout


def test_no_module_outgrows_its_reader() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}

    assert len(sizes) > 20, "the sources were not found"
    assert {path: lines for path, lines in sizes.items() if lines > MODULE_LINES} == {}


def test_no_function_outgrows_its_reader() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in modules()
        if path.parent.name != "versions"  # a migration is one list of statements, frozen once it is released
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef) and node.end_lineno and node.end_lineno - node.lineno >= FUNCTION_LINES
    }

    assert long == {}


def test_names_say_what_a_thing_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules()
        for name in (path.stem, *(node.name for node in definitions(path)))
        if words(name) & VAGUE and name not in OF_OTHERS
    ]

    assert found == []


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "begin the module with a docstring"
