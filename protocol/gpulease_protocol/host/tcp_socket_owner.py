"""The user who owns the other end of a TCP connection of this host, from `sock_diag` or from `/proc/net/tcp` and `tcp6`
(proc(5)). It tells the daemon who calls (`owner_of_connection`), and a client who answers (`owner_of_server`).

It works within one network namespace. Five traps, each with a test:

- A socket that its process has closed shows user 0 and inode 0, and a client that sends and hangs up is not root.
- When such a client is long gone, another user may be connecting from its port: a socket that is not connected yet is
  not the peer.
- One local port may be in use towards several remote ones at once, so both ends are compared.
- A program may reach 127.0.0.1 through an IPv6 socket (Java does): then the peer is in `tcp6`, as ::ffff:127.0.0.1.
- A connection that the server has not accepted yet has user 0 and inode 0, too. It belongs to the listener.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from gpulease_protocol.host import sock_diag
from gpulease_protocol.host.sock_diag import TCP_ESTABLISHED, TCP_LISTEN, TCP_SYN_RECV, TCP_SYN_SENT, TcpSocket

PROC_NET = Path("/proc/net")
NOT_ACCEPTED = (TCP_ESTABLISHED, TCP_SYN_RECV)
"""States of a connection that waits for its server to accept it."""
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
        owner = _connected(peer, own, proc_net)
        if owner is None or owner.inode == 0:
            return None
        # The kernel does not read uid and inode in one step: for root both are read again, and closed stays closed.
        if owner.uid != 0:
            return None if is_overflow_uid(owner.uid) else owner.uid
    return 0


def owner_of_server(server: Endpoint, own: Endpoint, proc_net: Path = PROC_NET) -> int | None:
    """The user who serves a TCP connection that this process has made; None if the kernel does not show it.

    That is who has accepted it. Until then it is who listens: the connection waits in the queue of one listener, and is
    reset when that closes. So if it waits before and after the listener is looked up, that listener has it. Some 0.05
    ms. Raises as `owner_of_connection`.
    """
    for _ in range(3):  # again if it is accepted just now
        found = _connected(server, own, proc_net)
        if found is None or found.inode != 0:
            return None if found is None else owner_of_connection(server, own, proc_net)
        listener = owner_of_listener(server, proc_net)
        if listener is not None and _is_not_accepted(found) and _is_not_accepted(_connected(server, own, proc_net)):
            return listener
    return None


def owner_of_listener(server: Endpoint, proc_net: Path = PROC_NET) -> int | None:
    """The user who listens for connections to this address; None if the kernel shows no one."""
    listener = _listening(server, proc_net)
    unknown = listener is None or listener.inode == 0 or is_overflow_uid(listener.uid)
    return None if listener is None or unknown else listener.uid


def _is_not_accepted(found: TcpSocket | None) -> bool:
    return found is not None and found.inode == 0 and found.state in NOT_ACCEPTED


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


def _connected(local: Endpoint, remote: Endpoint, proc_net: Path) -> TcpSocket | None:
    """The socket that is connected from `local` to `remote`: from sock_diag, or from the tables if that fails."""
    if proc_net is PROC_NET:
        with suppress(OSError):
            found = sock_diag.connected(local, remote)
            if found is not None or sock_diag.finds_sockets():
                return found
    for path, version in _tables(proc_net):
        endpoints = [_proc_format(*endpoint, version) for endpoint in (local, remote)]
        if None not in endpoints:
            for found in _rows(path, f": {endpoints[0]} {endpoints[1]} "):
                if found.state != TCP_SYN_SENT:
                    return found
    return None


def _listening(local: Endpoint, proc_net: Path) -> TcpSocket | None:
    """The socket that listens at `local`, or else at its port of every address."""
    if proc_net is PROC_NET:
        with suppress(OSError):
            found = sock_diag.listening(local)
            if found is not None or sock_diag.finds_sockets():
                return found
    for path, version in _tables(proc_net):
        for host in (local[0], "0.0.0.0" if version == 4 else "::"):  # noqa: S104 - is compared, not bound
            endpoint = _proc_format(host, local[1], version)
            for found in _rows(path, f": {endpoint} ") if endpoint is not None else ():
                if found.state == TCP_LISTEN:
                    return found
    return None


def _tables(proc_net: Path) -> Iterator[tuple[Path, int]]:
    """The tables of this kernel, each with its IP version."""
    yield proc_net / "tcp", 4
    if (proc_net / "tcp6").exists():
        yield proc_net / "tcp6", 6


def _rows(table: Path, pattern: str) -> Iterator[TcpSocket]:
    """The sockets with `pattern` in their row."""
    # Only the matching line is split: there may be thousands, and the event loop waits.
    for line in table.read_text().splitlines():
        if pattern in line and len(fields := line.split()) > 9:
            yield TcpSocket(int(fields[3], 16), int(fields[7]), int(fields[9]))


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
