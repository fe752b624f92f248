"""The reader of pages sees when a page is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Names, blocks, commands

A, B, X, Y = (f"lease-{letter * 16}" for letter in "abef")


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("free", "free"),
        ("a  b\nc", "a b \n  c"),
        (f"{A} waits for {B}", f"{X} waits for {Y}"),
        (f"{A} {A}", f"{X} {X}"),
        ("until 2026-11-20T23:23:43.581038Z", "until 2027-01-02T03:04:05Z"),
        ("in 4m 59s", "in 5m"),
        ("first\n...\nlast", "first\nmany\nlines\nlast"),
        ('"pid": 12', '"pid": 4711'),
    ],
)
def test_an_output_that_differs_only_in_what_must_differ(expected: str, printed: str) -> None:
    assert Names().learn(expected, printed)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("free", "leased"),
        ("free", "free leased"),
        ("a b", "ab"),
        ("", "something"),
        ("something", ""),
        (f"{A} {A}", f"{X} {Y}"),
        (f"{A} {B}", f"{X} {X}"),
        ("position 1", "position 2"),
        (f"{A}", "job-ffffffffffffffff is not a lease"),
    ],
)
def test_an_output_that_is_another(expected: str, printed: str) -> None:
    assert not Names().learn(expected, printed)


def test_an_id_is_known_from_its_first_appearance_on() -> None:
    names = Names()
    assert names.learn(A, X)
    assert names.apply(f"gpulease release {A} {B}") == f"gpulease release {X} {B}"
    assert not names.learn(A, Y)


def test_a_session_is_commands_and_what_they_print() -> None:
    session = "$ one \\\n    more\nprinted\n$ cat <<E\n> text\n> E\ntext\n$ silent\n"
    assert commands(session) == [("one \\\n    more", "printed"), ("cat <<E\ntext\nE", "text"), ("silent", "")]


def test_a_comment_belongs_to_the_block_behind_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- elsewhere -->\n\ntext\n\n<!-- first: a\nb -->\n<!-- not run: why -->\n```bash\nc\n```\n\n```text\n```\n"
    )
    first, second = blocks(page)
    assert first.notes == ("first: a\nb", "not run: why")
    assert (first.language, first.text, first.line) == ("bash", "c\n", 8)
    assert second.notes == ()
