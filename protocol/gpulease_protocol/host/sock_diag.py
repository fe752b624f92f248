"""Asks the kernel for the owner of one TCP socket (sock_diag(7)): 20 us, however many connections there are.

`/proc/net/tcp` says the same, but reading it walks the kernel's whole table: some 10 ms for each new connection, with
which hundreds of unknown callers could hold up the event loop for seconds.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from functools import cache
from typing import NamedTuple

SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLM_F_REQUEST = 20, 2, 1
NETLINK_SOCK_DIAG = 4
TCP_ESTABLISHED, TCP_SYN_SENT, TCP_SYN_RECV, TCP_LISTEN = 1, 2, 3, 10
MAPPED_PREFIX = bytes(10) + b"\xff\xff"
"""In front of an IPv4 address on an IPv6 socket."""
ALL_STATES = 0xFFFFFFFF
NLMSGHDR = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
REQUEST = struct.Struct("=BBBBI")
"""inet_diag_req_v2 up to the id: family, protocol, extensions, padding, states."""
SOCKET_ID = struct.Struct("!HH16s16s")
"""inet_diag_sockid: both ports and addresses, in network order; an interface and a cookie follow."""
ANY_INTERFACE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
RESPONSE = struct.Struct("=BBBB48sIIIII")
"""inet_diag_msg: family, state, timer, retransmissions, id, expiry, both queues, user, inode."""


class TcpSocket(NamedTuple):
    """A TCP socket of this host."""

    state: int
    """Its state, such as `TCP_ESTABLISHED`."""
    uid: int
    """The user who owns it; 0 also while no process has it."""
    inode: int
    """0 while no process has it: it was closed, or is not accepted yet."""


def connected(local: tuple[str, int], remote: tuple[str, int]) -> TcpSocket | None:
    """The socket that is connected from `local` to `remote`; None if there is none.

    An IPv6 socket that speaks IPv4 is found by its IPv4 addresses. Raises OSError if the kernel does not accept the
    request, ValueError for something that is not an address.
    """
    family, addresses = _pack_addresses(local[0], remote[0])
    socket_id = SOCKET_ID.pack(local[1], remote[1], *addresses)
    answer = _ask(family, socket_id)
    if answer is None:
        return None
    answered_family, found_id, found = answer
    if family == socket.AF_INET and answered_family == socket.AF_INET6:
        socket_id = SOCKET_ID.pack(local[1], remote[1], *(MAPPED_PREFIX + address[:4] for address in addresses))
    # If there is no such connection, the kernel answers with the listener on the port. And a socket that is only
    # connecting, from a port whose former owner has hung up, is not connected.
    return None if found.state in (TCP_LISTEN, TCP_SYN_SENT) or not found_id.startswith(socket_id) else found


def listening(local: tuple[str, int]) -> TcpSocket | None:
    """The socket that listens for connections to `local`; None if there is none. Raises as `connected`."""
    family, addresses = _pack_addresses(local[0], local[0])
    # No connection comes from port 0, so that the kernel can answer only with the listener.
    answer = _ask(family, SOCKET_ID.pack(local[1], 0, *addresses))
    return None if answer is None or answer[2].state != TCP_LISTEN else answer[2]


@cache
def finds_sockets() -> bool:
    """False if the kernel finds no TCP socket at all: without the module tcp_diag it answers as if there were none.

    Raises OSError, as `connected`.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listening(listener.getsockname()) is not None


def _ask(family: int, socket_id: bytes) -> tuple[int, bytes, TcpSocket] | None:
    """The family, the id and the rest of the socket that the kernel finds."""
    request = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + socket_id + ANY_INTERFACE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        length = NLMSGHDR.size + len(request)
        kernel.send(NLMSGHDR.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request)
        answer = kernel.recv(8192)
    kind = NLMSGHDR.unpack_from(answer)[1]
    if kind == NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, NLMSGHDR.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, "the kernel does not answer questions about connections (sock_diag)")
    found_family, state, _, _, found_id, _, _, _, uid, inode = RESPONSE.unpack_from(answer, NLMSGHDR.size)
    return found_family, found_id, TcpSocket(state, uid, inode)


def _pack_addresses(*hosts: str) -> tuple[int, list[bytes]]:
    """The address family to ask for, and the addresses in 16 bytes each."""
    addresses = [ipaddress.ip_address(host) for host in hosts]
    unmapped = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    if all(address.version == 4 for address in unmapped):
        return socket.AF_INET, [address.packed.ljust(16, b"\0") for address in unmapped]
    return socket.AF_INET6, [
        address.packed if address.version == 6 else MAPPED_PREFIX + address.packed for address in unmapped
    ]
