"""What a command imports and how soon it has started: people wait for it at every prompt and at every Tab.

`bench/startup.py` has the figures of a quiet machine.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench import startup
from gpulease_protocol.host import garbage
from tests.cli.programs import environ
from tests.daemon import DaemonProcess, eventually

HEAVY = {
    *("anyio", "asyncio", "httpcore2", "httpx2", "pydantic", "rich", "typer"),
    *("email", "http.client", "ssl"),
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


class WatchedDaemon(DaemonProcess):
    """A daemon that prints, on SIGUSR1, whether it looks for garbage and how often at the least."""

    @property
    def command(self) -> list[str]:
        program = (
            "import gc, os, signal, sys; from gpulease_cli import main\n"
            "def tell(*_):\n"  # at once, because a line of the log may be written meanwhile
            "    told = f'garbage {gc.isenabled()} {gc.get_threshold()[0]} {gc.get_freeze_count() > 0}\\n'\n"
            "    os.write(1, told.encode())\n"
            "signal.signal(signal.SIGUSR1, tell); sys.argv[0] = 'gpulease'; sys.exit(main())"
        )
        return [sys.executable, "-c", program, *super().command[3:]]


def test_a_daemon_that_serves_looks_for_garbage(tmp_path: Path) -> None:
    """It does not while it starts, which would leave the memory of what it drops later to no one."""
    running = WatchedDaemon(tmp_path / "d", "--no-worker")
    try:
        running.start(ready=False)
        assert running.process is not None
        running.process.send_signal(signal.SIGUSR1)
        eventually(lambda: f"garbage True {garbage.SERVING[0]} True" in running.output.read_text(), 30, running.story)
    finally:
        running.stop()


def test_the_garbage_of_a_long_command_is_found() -> None:
    """A command looks for it later than usual, and not never."""
    program = (
        "import gc, weakref; from gpulease_protocol.host import garbage; garbage.starting()\n"
        "class Node: pass\n"
        "node = Node(); node.self = node; seen = weakref.ref(node); del node\n"
        "kept = [[] for _ in range(garbage.STARTING + 1)]; assert seen() is None, 'never found'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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
