"""Redis with an append-only file and fsync for every command, which is as durable as gpulease is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.peers import listens, program, running
from tests.ports import free_port


@contextmanager
def redis(directory: Path) -> Iterator[int]:
    """The port of a server. Raises NotInstalled."""
    path, port = program("redis-server", "redis-server"), free_port()
    command = [path, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    with running(command, directory / "redis.log", lambda: listens(port)):
        yield port
