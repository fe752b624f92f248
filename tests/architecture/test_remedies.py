"""What a daemon says what to do is in the words of REST; the command line and Python say it in theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.rest_words import METHODS
from gpulease_cli.rest_words import COMMANDS
from gpulease_protocol.errors import respelled
from tests.api.documents import endpoints

SERVER = Path(__file__).parents[2] / "server" / "gpulease_server"
ANSWERS = ("api", "core", "runtime")
"""Packages that refuse requests; the others refuse to start a daemon."""
FOR_ADMINISTRATORS = re.compile("gpulease token create --user NAME --role worker")
"""For the one who puts up a worker."""


def texts() -> Iterator[str]:
    """Each string in the code, docstrings left out. What stands for a value is `{}`."""
    for path in (path for package in ANSWERS for path in (SERVER / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_a_daemon_names_routes_and_no_commands() -> None:
    command = re.compile(r"gpulease (status|leases|jobs|cancel|release|renew|explain|node|gpu|token|logs)")
    assert [text for text in texts() if command.search(FOR_ADMINISTRATORS.sub("", text))] == []


@pytest.mark.parametrize("words", [COMMANDS, METHODS], ids=["command line", "Python"])
def test_each_route_and_field_of_a_remedy_has_a_word(words: dict[str, str]) -> None:
    named = {word for text in texts() for word in re.findall("`([^`]+)`", text) if re.match(r'[A-Z]+ /v1|"', word)}
    assert len(named) > 6, "the remedies were not found"
    unknown = {word for word in named if respelled(f"`{word}`", words) == f"`{word}`"}
    assert unknown == {"GET /v1/{}"}, "of leases or of jobs"


def test_each_word_is_of_a_route_that_exists() -> None:
    routes = {re.sub(r"{\w+}", "{}", route) for route in endpoints()}
    for words in (COMMANDS, METHODS):
        assert {route for route in words if "/" in route} <= routes


def test_a_remedy_is_respelled() -> None:
    assert respelled("`GET /v1/jobs` lists them.", COMMANDS) == "`gpulease jobs` lists them."
    assert (
        respelled("Cancel the job: `POST /v1/jobs/job-1/cancel`.", METHODS)
        == 'Cancel the job: `client.cancel_job("job-1")`.'
    )
    assert respelled("Of a newer daemon: `GET /v1/x`, `y`.", COMMANDS) == "Of a newer daemon: `GET /v1/x`, `y`."
