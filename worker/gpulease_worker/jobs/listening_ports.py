"""Finds the ports of the lease range on which this node listens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.node_protocol import LEASE_PORTS

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"
"""State of a listening socket in these tables (`TCP_LISTEN` of the kernel's `tcp_states.h`)."""

log = logging.getLogger(__name__)


def in_use(previous: Iterable[int] = ()) -> tuple[int, ...]:
    """Ports of `LEASE_PORTS` that cannot be bound because a process listens there, ascending.

    While they cannot be read, for lack of file descriptors for example, the answer is `previous`, the last result.
    """
    found: set[int] = set()
    try:
        for table in TABLES:
            with suppress(FileNotFoundError):  # no tcp6 where IPv6 is switched off
                found.update(_listening(table))
    except OSError as error:
        log.warning("cannot read the ports in use: %s", error)
        return tuple(sorted(previous))
    return tuple(sorted(found))


def _listening(table: Path) -> set[int]:
    found: set[int] = set()
    for line in table.read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        port = int(local.rpartition(":")[2], 16)
        if state == LISTEN and port in LEASE_PORTS:
            found.add(port)
    return found
