"""Asks the kernel for one TCP connection (sock_diag(7)): 20 us, however many there are.

`/proc/net/tcp` has the same, but a reader walks the kernel's whole table: some 10 ms for each new connection, in which
hundreds of strangers could hold the event loop up for seconds.
"""

from __future__ import annotations

import socket
import struct

SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLM_F_REQUEST = 20, 2, 1
NETLINK_SOCK_DIAG, LISTEN = 4, 10
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
    """User and inode of the IPv4 socket that goes from `local` to `remote`; None where there is none.

    Raises OSError where the kernel does not take the question.
    """
    addresses = [socket.inet_aton(host).ljust(16, b"\0") for host, _ in (local, remote)]
    places = PLACES.pack(local[1], remote[1], *addresses)
    question = WANTED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + places + ANY_INTERFACE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        length = HEADER.size + len(question)
        kernel.send(HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + question)
        answer = kernel.recv(8192)
    kind = HEADER.unpack_from(answer)[1]
    if kind == NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, HEADER.size)[0]
        if code == 2:  # ENOENT
            return None
        raise OSError(code, "the kernel does not tell about connections")
    _, state, _, _, found, _, _, _, uid, inode = FOUND.unpack_from(answer, HEADER.size)
    # Where there is no such connection, the kernel answers with who listens on the port.
    return None if state == LISTEN or not found.startswith(places) else (uid, inode)
