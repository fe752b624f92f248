"""etcd, asked over its HTTP gateway. It commits with fsync before it answers, as gpulease does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.peers import listens, program, running
from tests.ports import free_port


@contextmanager
def etcd(directory: Path) -> Iterator[int]:
    """The port of a server of one member. Raises NotInstalled."""
    path = program("etcd", "etcd-server")
    port = free_port()
    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    command = [path, "--name", "bench", "--data-dir", str(directory / "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers]
    command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"bench={peers}"]
    with running(command, directory / "etcd.log", lambda: listens(port)):
        yield port
