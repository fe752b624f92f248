"""What a command imports and how soon it has started: people wait for it at every prompt and at every Tab.

`bench/startup.py` has the figures of a quiet machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from bench import startup
from tests.cli.programs import environ

HEAVY = {
    *("anyio", "asyncio", "httpcore2", "httpx2", "pydantic", "rich", "typer"),
    *("fastapi", "importlib.metadata", "psutil", "pynvml", "sqlalchemy", "torch"),
    *("gpulease.async_client", "gpulease.find_devices", "gpulease.cuda.ordinals", "gpulease_server", "gpulease_worker"),
}
"""Modules that a short command does without: each takes longer to import than such a command lasts, or leads to one."""
COMMANDS_OF_OTHERS = "gpulease_cli.commands."


def imported(url: str, *words: str) -> set[str]:
    """The modules that a command has imported at its end."""
    program = (
        "import sys; from gpulease_cli import main; code = main(sys.argv[1:]); sys.stdout.flush()\n"
        "sys.stderr.write(' '.join(sys.modules)); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environ(GPULEASE_URL=url), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(ran.stderr.split())


@pytest.mark.parametrize(
    ("words", "own"),
    [(("--help",), set()), (("status",), {"status"}), (("help", "logs"), {"jobs"})],
    ids=["help", "status", "help logs"],
)
def test_a_command_imports_no_other_and_nothing_heavy(url: str, words: tuple[str, ...], own: set[str]) -> None:
    modules = imported(url, *words)
    assert modules & HEAVY == set()
    commands = {name.removeprefix(COMMANDS_OF_OTHERS) for name in modules if name.startswith(COMMANDS_OF_OTHERS)}
    assert own <= commands
    assert not commands & {"run", "submit", "acquire", "tokens", "config", "events"}


def test_run_needs_neither_httpx_nor_colors(url: str) -> None:
    heavy = {"anyio", "asyncio", "httpx2", "pydantic", "rich"}
    assert imported(url, "run", "--wait", "1m", "--", "true") & heavy == set()


@pytest.mark.alone
@pytest.mark.budget(30)
def test_a_command_starts_in_a_few_times_what_python_takes(url: str) -> None:
    figures = startup.measured(url, 5)
    limit = statistics.median(figures[startup.LIMIT])
    times = {name: statistics.median(row) / limit for name, row in figures.items()}
    # Of these 4, 9 and 12 on a quiet machine; httpx2 would add 7 to the last two, a second Python 5 to the last.
    assert times["gpulease --help"] < 10, times
    assert times["gpulease status"] < 16, times
    assert times["gpulease run -- true"] < 20, times
