"""A network cable between this machine's tests and a PostgreSQL server, which can be pulled.

The far end is in a network namespace of its own, where a process passes connections on to the server's Unix socket.
When the cable is pulled nothing is refused and nothing is reset: packets are lost, as they are when a switch dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from tests.databases import PostgresServer

PORT = 5432


class Cable:
    """Plugged in on entry; cut between `pull` and `plug`. Needs root, for the namespace."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        name = f"gl{os.getpid() % 100_000}"
        self._near, self._far = f"{name}n", f"{name}f"
        self._addresses = [f"198.18.{os.getpid() % 251}.{number}" for number in (1, 2)]
        self._passing: subprocess.Popen[str] | None = None

    def url(self, database_url: str) -> str:
        """The same database, over the cable."""
        return database_url.replace(f"127.0.0.1:{self._server.port}", f"{self._addresses[1]}:{PORT}")

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            pytest.skip("a network namespace takes root")
        socket = self._server.directory / f".s.PGSQL.{self._server.port}"
        command = ["unshare", "--net", sys.executable, "-m", "tests.network_namespace", str(socket)]
        self._passing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert self._passing.stdout is not None
            assert self._passing.stdout.readline() == "listening\n"
            there = str(self._passing.pid)
            ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", there)
            ip("address", "add", f"{self._addresses[0]}/30", "dev", self._near)
            ip("link", "set", self._near, "up")
            self._at_the_far_end("address", "add", f"{self._addresses[1]}/30", "dev", self._far)
            # No one asks who has the address, so that no one finds out in this way that there is no answer.
            far = self._at_the_far_end("-brief", "link", "show", self._far).split()[2]
            ip("neighbour", "replace", self._addresses[1], "lladdr", far, "nud", "permanent", "dev", self._near)
            self.plug()
        except BaseException:
            self._passing.kill()
            self._passing.communicate()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._passing is not None
        ip("link", "delete", self._near)
        self._passing.communicate("", timeout=60)  # its namespace goes with it

    def pull(self) -> None:
        """From now on no packet arrives, in either direction."""
        self._at_the_far_end("link", "set", self._far, "down")

    def plug(self) -> None:
        """Packets arrive again."""
        self._at_the_far_end("link", "set", self._far, "up")

    def _at_the_far_end(self, *words: str) -> str:
        assert self._passing is not None
        return ip(*words, before=("nsenter", "--target", str(self._passing.pid), "--net"))


def ip(*words: str, before: tuple[str, ...] = ()) -> str:
    """What iproute2's `ip` prints."""
    return subprocess.run([*before, "ip", *words], check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on everything, then the end."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()


async def pass_on(socket: Path) -> None:
    """Connect each who comes to a Unix socket, until standard input ends."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner, outer = await asyncio.open_unix_connection(socket)
        except OSError:  # the server is down: so is this connection
            writer.close()
            return
        await asyncio.gather(copy(reader, outer), copy(inner, writer))

    await asyncio.start_server(connect, "0.0.0.0", PORT)
    print("listening", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(pass_on(Path(sys.argv[1])))
