"""Whose a loopback TCP connection is: the user who owns the peer's socket, as `socket_diag` says, or `/proc/net/tcp`
and `tcp6` (proc(5)).

It counts in one network namespace. Four traps, each with a test:

- A socket that its process has closed shows user 0 and inode 0, and whoever sends and hangs up is not root.
- Where such a one has long been forgotten, somebody else may be about to connect from its port: what is not connected
  yet is not the peer.
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

from . import socket_diag

PROC = Path("/proc/net")
CONNECTING = "02"
"""The state TCP_SYN_SENT, as the kernel prints it."""
End = tuple[str, int]
"""Address and port."""


def is_loopback(host: str) -> bool:
    """True for an address that only this network namespace can have sent from."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def owner_of_connection(peer: End, own: End, proc: Path = PROC) -> int | None:
    """The user whose socket is the other end of a TCP connection of this host; None where nobody's is found.

    Raises OSError where the table of IPv4 cannot be read; a kernel without IPv6 has no other.
    """
    for _ in range(2):
        found = next(_rows(peer, own, proc), None)
        if found is None or found[1] == 0:
            return None
        # The kernel does not read the two numbers in one step: root's are read again, and closed stays closed.
        if found[0] != 0:
            return None if stands_for_others(found[0]) else found[0]
    return 0


@cache
def stands_for_others(uid: int) -> bool:
    """True for the number under which a user namespace shows everybody whom it does not know: it names nobody.

    Outside a user namespace it is the user `nobody`, as anybody else.
    """
    try:
        everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return not everybody and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False


def _rows(peer: End, own: End, proc: Path) -> Iterator[tuple[int, int]]:
    """User and inode of the sockets that go from `peer` to `own`: from the kernel, or where it does not answer, from
    its tables."""
    if proc is PROC:
        with suppress(OSError):
            asked = socket_diag.owner(peer, own)
            if asked is not None:
                yield asked
            return
    for name, version in (("tcp", 4), ("tcp6", 6)):
        ends = [_spelled(*end, version) for end in (peer, own)]
        path = proc / name
        if None in ends or (version == 6 and not path.exists()):
            continue
        wanted = f": {ends[0]} {ends[1]} "
        # Only the line that is looked for is taken apart: there may be thousands, and the event loop waits.
        for line in path.read_text().splitlines():
            if wanted in line and len(words := line.split()) > 9 and words[3] != CONNECTING:
                yield int(words[7]), int(words[9])


def _spelled(host: str, port: int, version: int) -> str | None:
    """An end as the kernel prints it in the table of an IP version: words of 32 bits in the machine's byte order. None
    for an address that this table cannot have."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        packed = address.packed if version == 4 else socket.inet_pton(socket.AF_INET6, f"::ffff:{host}")
    elif version == 4 and address.ipv4_mapped is None:
        return None
    else:
        packed = address.ipv4_mapped.packed if version == 4 and address.ipv4_mapped else address.packed
    words = (packed[place : place + 4] for place in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
