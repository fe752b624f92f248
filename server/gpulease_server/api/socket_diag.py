"""Asks the kernel for one TCP connection (sock_diag(7)): 20 us, however many there are.

`/proc/net/tcp` has the same, but a reader walks the kernel's whole table: some 10 ms for each new connection, in which
hundreds of strangers could hold the event loop up for seconds.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct

SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLM_F_REQUEST = 20, 2, 1
NETLINK_SOCK_DIAG = 4
LISTEN, CONNECTING = 10, 2
"""States: TCP_LISTEN, TCP_SYN_SENT."""
MAPPED = bytes(10) + b"\xff\xff"
"""In front of an IPv4 address that an IPv6 socket has."""
ALL_STATES = 0xFFFFFFFF
HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
WANTED = struct.Struct("=BBBBI")
"""inet_diag_req_v2 up to the id: family, protocol, extensions, padding, states."""
PLACES = struct.Struct("!HH16s16s")
"""inet_diag_sockid: both ports and addresses, in network order; an interface and a cookie follow."""
ANY_INTERFACE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
FOUND = struct.Struct("=BBBB48sIIIII")
"""inet_diag_msg: family, state, timer, retransmissions, id, expiry, both queues, user, inode."""


def owner(local: tuple[str, int], remote: tuple[str, int]) -> tuple[int, int] | None:
    """User and inode of the socket that is connected from `local` to `remote`; None where there is none.

    An IPv6 socket that speaks IPv4 is found by its IPv4 addresses. Raises OSError where the kernel does not take the
    question, ValueError for what is no address.
    """
    family, ends = _packed(local[0], remote[0])
    places = PLACES.pack(local[1], remote[1], *ends)
    question = WANTED.pack(family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + places + ANY_INTERFACE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        length = HEADER.size + len(question)
        kernel.send(HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + question)
        answer = kernel.recv(8192)
    kind = HEADER.unpack_from(answer)[1]
    if kind == NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, HEADER.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, "the kernel does not tell about connections")
    answered, state, _, _, found, _, _, _, uid, inode = FOUND.unpack_from(answer, HEADER.size)
    if family == socket.AF_INET and answered == socket.AF_INET6:
        places = PLACES.pack(local[1], remote[1], *(MAPPED + end[:4] for end in ends))
    # Where there is no such connection, the kernel answers with who listens on the port; and who is only about to
    # connect from the port of one who has hung up is not the one who has called.
    return None if state in (LISTEN, CONNECTING) or not found.startswith(places) else (uid, inode)


def _packed(*hosts: str) -> tuple[int, list[bytes]]:
    """The family to ask for, and the addresses in 16 bytes each."""
    addresses = [ipaddress.ip_address(host) for host in hosts]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    if all(address.version == 4 for address in plain):
        return socket.AF_INET, [address.packed.ljust(16, b"\0") for address in plain]
    return socket.AF_INET6, [address.packed if address.version == 6 else MAPPED + address.packed for address in plain]
