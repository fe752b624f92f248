"""Under which address and through which interface other nodes reach this one.

By default the address is the one from which the daemon is reached, because what reaches the daemon reaches the other
nodes too. On the daemon's own host, where that is loopback or a Unix socket, it is the one on which the daemon listens
for other hosts. `--address` names another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from urllib.parse import urlsplit

from gpulease_protocol.host.addresses import Address

REFRESH_S = 60.0
"""Time between two looks: an address may come from DHCP."""
LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


def _address_towards(daemon: Address) -> str | None:
    """This host's address on the way to the daemon, by the routing table; nothing is sent. None without a route, and
    where the daemon's name cannot be resolved. Blocks while it is resolved."""
    parts = urlsplit(daemon.origin)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def _interface_of(address: str) -> str | None:
    """Name of the network interface that has this address; None if none has, as behind NAT."""
    import psutil  # noqa: PLC0415 - once a minute, and not before the first report

    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        found = (one.address.partition("%")[0] for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))
        if any(ipaddress.ip_address(one) == wanted for one in found):
            return str(name)
    return None


class NodeAddress:
    """The address and interface of this node, looked up in a thread: no report waits for a name server.

    Args:
        configured: The address that an administrator has named; None to find it by the route to the daemon.
    """

    def __init__(self, configured: str | None) -> None:
        self._configured = configured
        self.address = configured
        """IP address; None while it is not known."""
        self.interface: str | None = None
        """The interface that has it; None while it is not known, and where none has it."""
        self._looking: asyncio.Task[None] | None = None
        self._looked_at_s = float("-inf")
        self._sources: tuple[Address, str | None] | None = None
        """What the last look went by."""

    def refresh(self, daemon: Address, daemon_address: str | None) -> None:
        """Look again if that is due. `daemon`: where it answers; `daemon_address`: where it says that others reach
        it."""
        is_looking = self._looking is not None and not self._looking.done()
        sources = daemon, daemon_address
        if is_looking or (sources == self._sources and time.monotonic() - self._looked_at_s < REFRESH_S):
            return
        self._looked_at_s, self._sources = time.monotonic(), sources
        self._looking = asyncio.create_task(self._look(*sources))

    def look_soon(self) -> None:
        """With the next refresh, due or not: the daemon could not be reached, perhaps because this host has moved."""
        self._sources = None

    async def _look(self, daemon: Address, daemon_address: str | None) -> None:
        found = await asyncio.to_thread(_find, self._configured, daemon, daemon_address)
        if found is None:
            return  # what was known last is the best guess
        if found != (self.address, self.interface):
            log.info("the address of this node is %s, of interface %s", found[0], found[1] or "unknown")
        self.address, self.interface = found


def _find(configured: str | None, daemon: Address, daemon_address: str | None) -> tuple[str, str | None] | None:
    if configured is not None:
        return configured, _interface_of(configured)
    address = LOOPBACK if daemon.socket is not None else _address_towards(daemon)
    if address is None:
        return None
    if daemon_address is not None and ipaddress.ip_address(address).is_loopback:
        interface = _interface_of(daemon_address)
        if interface is not None:  # else the loopback address is the end of a tunnel to another host
            return daemon_address, interface
    return address, _interface_of(address)
