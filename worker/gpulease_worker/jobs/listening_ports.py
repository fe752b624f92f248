"""Finds the ports of the lease range on which this node listens.

The kernel is asked for listening sockets alone (sock_diag(7), as `ss -lt` does). The tables in /proc/net list every
connection, and to write them the kernel walks through a hash table that has hundreds of thousands of rows on a large
host: 7 ms for each report. They are read where the kernel has no sock_diag.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.node_protocol import LEASE_PORTS

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = 10
"""State of a listening socket (`TCP_LISTEN` of the kernel's `tcp_states.h`)."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence number, port."""
REQUEST = struct.Struct("=BBBxI48x")
"""`struct inet_diag_req_v2`: address family, protocol, extensions, set of states; any address."""
SOURCE_PORT = struct.Struct("!4xH")
"""Of `struct inet_diag_msg`: the port, after four single bytes."""
ANSWER_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 2**16

log = logging.getLogger(__name__)


def in_use(previous: Iterable[int] = ()) -> tuple[int, ...]:
    """Ports of `LEASE_PORTS` that cannot be bound because a process listens there, ascending.

    While they cannot be read, for lack of file descriptors for example, the answer is `previous`, the last result.
    """
    try:
        found = set(_from_sock_diag())
    except OSError:
        try:
            found = set(_from_tables())
        except OSError as error:
            log.warning("cannot read the ports in use: %s", error)
            return tuple(sorted(previous))
    return tuple(sorted(found & set(LEASE_PORTS)))


def _from_sock_diag() -> Iterator[int]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << LISTEN)
            size = HEADER.size + len(request)
            kernel.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0) + request)
            while (ports := _ports(kernel.recv(MAX_ANSWER_BYTES))) is not None:
                yield from ports


def _ports(answer: bytes) -> list[int] | None:
    """The ports in one part of an answer; None after its end. Raises OSError where it is an error."""
    ports: list[int] = []
    at = 0
    while at < len(answer):
        size, kind, *_ = HEADER.unpack_from(answer, at)
        if kind == NLMSG_ERROR:
            (number,) = struct.unpack_from("=i", answer, at + HEADER.size)
            raise OSError(-number, os.strerror(-number))
        if kind == NLMSG_DONE:
            return None
        ports += SOURCE_PORT.unpack_from(answer, at + HEADER.size)
        at += (size + 3) & ~3  # messages are aligned to four bytes
    return ports


def _from_tables() -> Iterator[int]:
    for table in TABLES:
        with suppress(FileNotFoundError):  # no tcp6 where IPv6 is switched off
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if int(state, 16) == LISTEN:
                    yield int(local.rpartition(":")[2], 16)
