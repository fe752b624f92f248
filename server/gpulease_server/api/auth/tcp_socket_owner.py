"""The user who owns the other end of a loopback TCP connection, from `sock_diag` or from `/proc/net/tcp` and `tcp6`
(proc(5)).

It works within one network namespace. Four traps, each with a test:

- A socket that its process has closed shows user 0 and inode 0, and a client that sends and hangs up is not root.
- When such a client is long gone, another user may be connecting from its port: a socket that is not connected yet is
  not the peer.
- One local port may be in use towards several remote ones at once, so both ends are compared.
- A program may reach 127.0.0.1 through an IPv6 socket (Java does): then the peer is in `tcp6`, as ::ffff:127.0.0.1.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from gpulease_server.api.auth import sock_diag

PROC_NET = Path("/proc/net")
SYN_SENT = "02"
"""TCP_SYN_SENT as the kernel prints it."""
Endpoint = tuple[str, int]
"""Address and port."""


def is_loopback(host: str) -> bool:
    """True for an address that only this network namespace can have sent from."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def owner_of_connection(peer: Endpoint, own: Endpoint, proc_net: Path = PROC_NET) -> int | None:
    """The user who owns the other end of a TCP connection of this host; None if it is not found.

    Raises OSError if the IPv4 table cannot be read; a kernel without IPv6 has no other.
    """
    for _ in range(2):
        owner = next(_owners(peer, own, proc_net), None)
        if owner is None or owner[1] == 0:
            return None
        # The kernel does not read uid and inode in one step: for root both are read again, and closed stays closed.
        if owner[0] != 0:
            return None if is_overflow_uid(owner[0]) else owner[0]
    return 0


@cache
def is_overflow_uid(uid: int) -> bool:
    """True for the uid that a user namespace shows for every user it does not map, and so identifies none of them.

    Outside a user namespace it is the user `nobody`, a user like any other.
    """
    try:
        maps_all_users = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return not maps_all_users and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False


def _owners(peer: Endpoint, own: Endpoint, proc_net: Path) -> Iterator[tuple[int, int]]:
    """User and inode of the sockets that go from `peer` to `own`: from sock_diag, or from the tables if that fails."""
    if proc_net is PROC_NET:
        with suppress(OSError):
            owner = sock_diag.socket_owner(peer, own)
            if owner is not None:
                yield owner
            return
    for name, version in (("tcp", 4), ("tcp6", 6)):
        endpoints = [_proc_format(*endpoint, version) for endpoint in (peer, own)]
        path = proc_net / name
        if None in endpoints or (version == 6 and not path.exists()):
            continue
        pattern = f": {endpoints[0]} {endpoints[1]} "
        # Only the matching line is split: there may be thousands, and the event loop waits.
        for line in path.read_text().splitlines():
            if pattern in line and len(fields := line.split()) > 9 and fields[3] != SYN_SENT:
                yield int(fields[7]), int(fields[9])


def _proc_format(host: str, port: int, version: int) -> str | None:
    """An endpoint as the kernel prints it in the table of an IP version: 32-bit words in the machine's byte order. None
    for an address that this table cannot contain."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        packed = address.packed if version == 4 else socket.inet_pton(socket.AF_INET6, f"::ffff:{host}")
    elif version == 4 and address.ipv4_mapped is None:
        return None
    else:
        packed = address.ipv4_mapped.packed if version == 4 and address.ipv4_mapped else address.packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
