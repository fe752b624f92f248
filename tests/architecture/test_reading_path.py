"""The README's path through the code leads to a grant, exists, and is as long as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST_LINES = 1300


def steps() -> list[tuple[Path, list[str]]]:
    """Each file of the path, with the names to read in it; none for the whole file."""
    section = README[README.index("follow a grant") :]
    found = [
        re.findall(r"`([^`]+)`", line.partition(":")[0]) for line in re.findall(r"^\d+\. (.*)$", section, re.MULTILINE)
    ]
    return [(ROOT / path, names) for path, *names in found]


def lines(path: Path, names: list[str]) -> int:
    """Lines of a file, or of some classes, functions and methods (`Class.method`) in it."""
    text = path.read_text()
    if not names:
        return len(text.splitlines())
    sizes: dict[str, int] = {}
    for node in ast.parse(text).body:
        for name, part in [(getattr(node, "name", ""), node)] + [
            (f"{node.name}.{part.name}", part)
            for part in getattr(node, "body", [])
            if isinstance(node, ast.ClassDef) and isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]:
            first = min([part.lineno, *(each.lineno for each in getattr(part, "decorator_list", []))])
            sizes[name] = (part.end_lineno or first) - first + 1
    return sum(sizes[name] for name in names)


def test_the_path_is_as_long_as_it_says() -> None:
    total = sum(lines(path, names) for path, names in steps())
    (claimed,) = re.findall(r"follow a grant through the code, about ([\d,]+) lines", README)

    assert len(steps()) > 6
    assert total <= MOST_LINES
    assert abs(total - int(claimed.replace(",", ""))) <= 50, f"the path has {total} lines"


def test_the_path_leads_to_a_grant() -> None:
    assert any(path.name == "grant.py" for path, _ in steps())
