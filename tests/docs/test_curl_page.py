"""docs/curl.md shows every endpoint that the daemon has."""

from __future__ import annotations

import itertools
import re
import shlex
from urllib.parse import urlsplit

from tests.api.documents import endpoints
from tests.docs.pages import ROOT, blocks, commands

NOT_SHOWN = {
    ("POST", "/v1/nodes/{name}/exchange"): "between worker and daemon",
    ("POST", "/v1/nodes/{name}/logs"): "between worker and daemon",
    ("POST", "/v1/nodes/{name}/join"): "between a new host and the daemon",
}
TAKES_A_BODY = {"--json", "-d", "--data"}


def typed() -> set[tuple[str, str]]:
    """Method and path of each request of the page."""
    found = set()
    for block in blocks(ROOT / "docs" / "curl.md"):
        for line, _ in commands(block.text) if block.language == "console" else []:
            lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars="|;")
            lexer.whitespace_split = True
            words = list(lexer)
            for begin in (at for at, word in enumerate(words) if word == "curl"):
                call = list(itertools.takewhile(lambda word: word not in "|;", words[begin:]))
                found.add((method(call), path(call)))
    return found


def method(words: list[str]) -> str:
    if "-X" in words:
        return words[words.index("-X") + 1]
    return "POST" if TAKES_A_BODY.intersection(words) else "GET"


def path(words: list[str]) -> str:
    (address,) = (word for word in words if word.startswith("127.0.0.1:8750"))
    return urlsplit(f"http://{address}").path


def fits(template: str, asked: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), asked) is not None


def test_every_endpoint_is_on_the_page() -> None:
    calls = typed()
    missing = {
        (verb, template)
        for verb, template in map(str.split, endpoints())
        if not any(verb == done and fits(template, asked) for done, asked in calls)
    }
    assert missing == set(NOT_SHOWN)
