"""English that a stranger reads once: words and turns of phrase that this project avoids, with better ones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = (".py", ".md", ".js", ".toml", ".yml", ".service", ".socket", ".html", ".sh", ".c")
HISTORY = {"CHANGELOG.md", "tests/RECORD.md", "tests/architecture/test_language.py"}
AVOIDED = {
    r"who(so)?ever|whomever": "anyone who, everyone who, the caller",
    r"somebody|anybody|everybody|nobody": "someone, anyone, everyone, no one; or name the user or process",
    r"he|him|his|himself|she|her": "they, their; or it, for a process",
    r"anew": "again",
    r"for ever": "forever",
    r"elders?": "older request",
    r"to be had": "available",
    r"in force": "valid",
    r"what of|whereof|thereby|wherein": "a plain sentence",
    r"s[ia]ts? out|sitting out": "waits for, retries",
    r"of no use": "useless",
    r"(is|are|was) over(?=[.,;:)]|$| and\b| in\b| by\b| when\b)": "has ended",
    r"whose an? \w+ (is|was)": "which lease (user, job) a ... belongs to",
    r"heeds?|heeded": "obeys, follows",
    r"be it": "whether",
    r"that is not how": "invalid usage",
    r"as whom": "the user that ... runs as",
    r"in vain": "useless, without effect",
    r"as ever": "as before, as usual",
    r"belongs? into": "belongs in",
    r"excludes? each other": "cannot be combined",
    r"mend(s|ed|ing)?": "fix, repair",
    r"(spelled|called) so": "in that spelling, with that name",
    r"(sound|well) again": "recovers",
    r"com(e|es|ing) to (its|their) end": "ends",
    r"(asked|asks|asking) nothing": "does not access, does not query",
}
"""A regular expression of whole words, and what to write instead."""


WHOLE = r"""(?<![\w'’./"`-])(?:%s)(?![\w/])"""
ANYTHING = re.compile(WHOLE % "|".join(AVOIDED), re.IGNORECASE)


def found(text: str) -> list[tuple[int, str, str]]:
    """Line, match and better words of everything avoided in a text. Underscores separate words, so names count too."""
    plain = text.replace("_", " ")
    if ANYTHING.search(plain) is None:  # one walk through a text, not one for each
        return []
    return [
        (plain.count("\n", 0, match.start()) + 1, match.group(), better)
        for words, better in AVOIDED.items()
        for match in re.finditer(WHOLE % words, plain, re.IGNORECASE)
    ]


def test_the_words_that_we_avoid_are_nowhere() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if name.endswith(KINDS) and name not in HISTORY and (ROOT / name).is_file()]
    assert len(files) > 300, "the sources were not found"
    avoided = [
        f"{name}:{line}: {words!r}: write {better}"
        for name in files
        for line, words, better in found((ROOT / name).read_text())
    ]

    assert avoided == []


@pytest.mark.parametrize(
    "sentence",
    ["Whoever waits is told.", "def test_nobody_waits() -> None:", "The user and his jobs", "It lasts\nfor ever."],
)
def test_a_word_that_we_avoid_is_found(sentence: str) -> None:
    assert found(sentence)


@pytest.mark.parametrize(
    "sentence", ["The other half.", "This history shows it.", "https://x/he", "The limit was overridden."]
)
def test_a_word_that_only_contains_one_is_not(sentence: str) -> None:
    assert not found(sentence)
