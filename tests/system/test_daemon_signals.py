"""Signals end a daemon in good order, whenever they come."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, daemon, eventually

EARLY = """
import os, signal, sys, uvicorn
import gpulease_server.serving
begin = uvicorn.Server.run
def signalled(*arguments, **options):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return begin(*arguments, **options)
uvicorn.Server.run = signalled
from gpulease_cli import main
sys.exit(main(["serve", "--simulate", "1", "--port", "0", "--data-dir", sys.argv[2]]))
"""
"""A daemon that gets a signal just before uvicorn takes signals."""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_that_comes_as_it_begins_to_serve_ends_it(tmp_path: Path, name: str) -> None:
    words = [sys.executable, "-c", EARLY, name, str(tmp_path / "d")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 0, told
    assert "gpulease has stopped" in told


def test_it_ends_in_good_order_when_its_terminal_is_closed(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running:
        assert running.process is not None
        running.process.send_signal(signal.SIGHUP)
        assert running.process.wait(60) == 0, running.story()
        assert "gpulease has stopped" in running.story()


@pytest.mark.slow
def test_a_request_of_which_the_commit_hangs_while_it_ends_is_told_that_it_may_be_recorded(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running, ThreadPoolExecutor(1) as pool:
        assert running.process is not None
        with closing(sqlite3.connect(running.data_dir / "gpulease.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            asking = pool.submit(running.call, "POST", "/v1/leases", {})
            eventually(lambda: b"\ngpulease_commit_pending_seconds 0.0\n" not in running.get("/metrics").content, 30)
            running.process.send_signal(signal.SIGTERM)
            answer = asking.result(60)
            assert (answer.status, answer.json["outcome"]) == (503, "unknown"), running.story()
            other.execute("ROLLBACK")
        assert running.process.wait(60) == 0, running.story()


def test_under_nohup_it_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    # Executed, not forked: a process that forks them for all tests ignores nothing.
    running = DaemonProcess(tmp_path / "d", "--simulate", "1", environment={"PYTHONUNBUFFERED": "yes"})
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        assert running.process is not None
        running.process.send_signal(signal.SIGHUP)
        assert running.request_lease(wait_s=50)["state"] == "active", running.story()
    finally:
        assert running.stop() == 0


def ended_once_it_says(line: str, words: list[str]) -> tuple[int, str, str]:
    """Send SIGTERM to a program once it has written this line. Returns its exit code, its output and log."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(60, process.kill)
        patience.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGTERM)
            shown, told = process.communicate()
        finally:
            patience.cancel()
            process.kill()
    return process.returncode, shown, told


HANGING = """
import sys, threading
import gpulease_server.serving as serving
from gpulease_server.runtime.retention import Pruner
from gpulease_server.store.ledger_store import Store
from gpulease_cli import main

def hang(*arguments):
    print("hangs", flush=True)
    threading.Event().wait()

if sys.argv[1] == "commit":
    Store.write = hang
else:
    Pruner.prune = lambda *arguments: serving.asyncio.to_thread(hang)
serving.STOP_S = 2.0
sys.exit(main(["serve", "--simulate", "1", "--port", "0", "--data-dir", sys.argv[2]]))
"""
"""A daemon in which something hangs as soon as it serves."""


@pytest.mark.parametrize("what", ["commit", "thread"])
def test_it_ends_although_something_hangs(tmp_path: Path, what: str) -> None:
    words = [sys.executable, "-c", HANGING, what, str(tmp_path / "d")]
    code, _, told = ended_once_it_says("hangs", words)
    assert code == 1, told
    assert "the end takes longer than 2 s" in told


FAILING = """
import asyncio, itertools, sys
import gpulease_server.serving as serving
from gpulease_server.runtime.retention import Pruner
from gpulease_server.runtime.writer import Writer
from gpulease_cli import main

runs = itertools.count(1)

async def fail(*arguments):
    if next(runs) == 1:
        raise ZeroDivisionError("a bug")
    print("again", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        raise ZeroDivisionError("another one")

def closed(writer, close=Writer.close):
    print("closed", flush=True)
    close(writer)

Pruner.run, Writer.close = fail, closed
serving.RESTART_S = 0.1
sys.exit(main(["serve", "--simulate", "1", "--port", "0", "--data-dir", sys.argv[1]]))
"""
"""A daemon of which a part fails, once while it serves and once as it ends."""


def test_a_part_that_fails_is_logged_and_begins_again_and_hinders_no_end(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FAILING, str(tmp_path / "d")]
    code, shown, told = ended_once_it_says("again", words)
    assert code == 0, told
    assert "closed" in shown
    assert "ZeroDivisionError: a bug" in told
    assert "ZeroDivisionError: another one" in told
