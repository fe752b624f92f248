"""Which network interface of this host leads to an address."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915
"""ioctl of Linux: the IPv4 address of an interface."""
PROC_INET6 = Path("/proc/net/if_inet6")


def towards(address: str) -> str | None:
    """Name of the interface through which an IP address is reached, as the routing table says; None if that is unknown.

    The route of a socket without a connection is looked up, and nothing is sent. For an address of this host itself it
    is the interface that has it, because the others reach this host through that one.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            here = probe.getsockname()[0]
    except OSError:
        return None
    return _with_ipv4(here) if family is socket.AF_INET else _with_ipv6(here)


def _with_ipv4(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _with_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with suppress(OSError):
        for line in PROC_INET6.read_text().splitlines():
            found, *_, name = line.split()
            if found == wanted:
                return name
    return None
