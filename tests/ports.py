"""TCP ports for the servers of the tests.

The kernel gives ports from `net.ipv4.ip_local_port_range` to outgoing connections and to sockets bound to port 0. A
port that was found free there can be another process's a moment later. These ports lie below that range and above the
ports of leases, and each test process draws from a block that is its own.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice

FIRST_PORT, LAST_PORT, BLOCK = 23_000, 28_999, 100


def free_port() -> int:
    """A port of loopback that nothing listens on, and that no other process is given."""
    for port in islice(_ports_of_this_process()[1], BLOCK):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"All {BLOCK} ports of this process are in use. Stop the servers of tests that have ended.")


@cache
def _ports_of_this_process() -> tuple[socket.socket, Iterator[int]]:
    """A block's ports again and again, and the abstract Unix socket that marks the block while the process lives."""
    mark = socket.socket(socket.AF_UNIX)
    for first in range(FIRST_PORT, LAST_PORT, BLOCK):
        try:
            mark.bind(f"\0gpulease-tests-ports-{first}")
        except OSError:
            continue
        return mark, cycle(range(first, first + BLOCK))
    raise RuntimeError(f"The ports {FIRST_PORT}-{LAST_PORT} are all in use by test processes. End some of them.")
