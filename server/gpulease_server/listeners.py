"""The sockets on which a daemon listens: a Unix socket, and TCP.

- By default TCP is 127.0.0.1 and ::1, for `localhost` may mean either: another program at ::1 would be taken for the
  daemon.
- A port that another user has taken keeps the daemon from neither starting nor serving its socket. It takes the port
  when that is free (`TcpAddress.try_listen`). A port that root or the daemon's own user has is a mistake, and an error.
- Sockets that systemd has opened are used instead of the settings (`socket_activation`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.host.tcp_socket_owner import is_loopback, owner_of_listener
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server import other_daemons
from gpulease_server.settings import ServeSettings
from gpulease_server.socket_activation import inherited_sockets

log = logging.getLogger("gpulease.serve")
DEFAULT_HOSTS = {"127.0.0.1", "localhost"}
"""Hosts beside which ::1 is listened on."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (unix(7))."""
WILDCARDS = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104 - read, not bound
"""By address that means all of a host: one that is nowhere (RFC 5737, RFC 3849), to ask for the default route."""
ALL_WILDCARDS = ["::", "0.0.0.0"]  # noqa: S104 - read, not bound
"""What a socket at `::` listens on: also IPv4, unless it is told otherwise."""
NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class CannotStart(GpuleaseError):
    """The daemon cannot start with these settings."""

    code, title = "cannot_start", "Cannot start"


@dataclass(slots=True)
class TcpAddress:
    """An address on which the daemon wants to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def try_listen(self) -> socket.socket:
        """A listening socket. Raises OSError or OverflowError.

        It listens from here on, and not only when the daemon is ready: of a socket that is only bound, another user may
        take the port.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener


@dataclass(slots=True)
class Listeners:
    """The sockets of a daemon, and the addresses that it could not have."""

    local: socket.socket
    """The Unix socket."""
    path: Path
    """Where that is."""
    tcp: list[socket.socket]
    missing: list[TcpAddress] = field(default_factory=list)
    """Taken by other users."""

    def outward_address(self) -> str | None:
        """The IP address at which other hosts reach the daemon; None if it listens on loopback alone. For a socket on
        all addresses it is the one of the default route; without a route, the first one of this host."""
        for listener in self.tcp:
            host = str(listener.getsockname()[0])
            if host not in WILDCARDS:
                found = None if is_loopback(host) else host
            else:
                wildcards = [host] if listener.family == socket.AF_INET or _is_ipv6_alone(listener) else ALL_WILDCARDS
                found = _first_of_host(wildcards)
            if found is not None:
                return found
        return None

    def urls(self, scheme: str) -> list[str]:
        """Where the daemon listens, for people."""
        names = [TcpAddress(*listener.getsockname()[:2]) for listener in self.tcp]
        return [*(f"{scheme}://{name}" for name in names), f"unix://{self.path}"]


def _is_ipv6_alone(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))


def _of_default_route(wildcard: str) -> str:
    """The address of the default route; empty without one."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((WILDCARDS[wildcard], 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return ""


def _of_interfaces() -> Iterator[str]:
    import psutil  # noqa: PLC0415 - few hosts have no default route

    for addresses in psutil.net_if_addrs().values():
        yield from (one.address for one in addresses)


def _first_of_host(wildcards: list[str]) -> str | None:
    """The address of the default route, else, as in a network without a router, the first one of this host."""
    versions = {6 if ":" in wildcard else 4 for wildcard in wildcards}
    for text in itertools.chain(map(_of_default_route, wildcards), _of_interfaces()):
        with contextlib.suppress(ValueError):  # a hardware address
            address = ipaddress.ip_address(text.partition("%")[0])
            if address.version in versions and not (address.is_loopback or address.is_link_local):
                return str(address)
    return None


@contextlib.contextmanager
def opened(settings: ServeSettings, data_dir: Path) -> Iterator[Listeners]:
    """The sockets of a daemon with these settings, inherited or new, closed at the end. Raises `CannotStart`."""
    with contextlib.ExitStack() as stack:
        try:
            inherited = inherited_sockets()
        except ValueError as error:
            raise CannotStart(f"{error}.", remedy="Correct the unit that opens the sockets.") from None
        local = [stack.enter_context(one) for one in inherited if one.family == socket.AF_UNIX]
        tcp = [stack.enter_context(one) for one in inherited if one.family != socket.AF_UNIX]
        missing: list[TcpAddress] = []
        if len(local) > 1:
            raise CannotStart("Two Unix sockets are inherited.", remedy="Leave one in the unit that opens them.")
        for listener in tcp:
            check_exposure(settings, listener.getsockname()[0])
        if not tcp:
            tcp, missing = listen_tcp(settings.host, settings.port)
            for listener in tcp:
                stack.enter_context(listener)
        if local:
            path = Path(os.fsdecode(local[0].getsockname()))
        else:
            path = (settings.socket or data_dir / "gpulease.sock").absolute()
            local = [stack.enter_context(listen_unix(path, int(settings.socket_mode, 8)))]
            stack.callback(path.unlink, missing_ok=True)
        yield Listeners(local[0], path, tcp, missing)


def check_exposure(settings: ServeSettings, host: str) -> None:
    """Raise `CannotStart` if tokens would cross a network unencrypted."""
    if not (is_loopback(host) or host == "localhost" or settings.tls is not None or settings.behind_proxy):
        raise CannotStart(
            f"{host} is not a loopback address. Without TLS, anyone on the network can read the tokens.",
            remedy="Give --tls-auto, or --tls-cert and --tls-key, or --behind-proxy where a proxy speaks TLS, or use"
            " --host 127.0.0.1 and ssh -L.",
        )


def listen_tcp(host: str, port: int) -> tuple[list[socket.socket], list[TcpAddress]]:
    """Listening TCP sockets, and the addresses that other users have taken.

    Raises `CannotStart` if the address is not one of this host, or if root or this user has the port.
    """
    wanted = TcpAddress("127.0.0.1" if host == "localhost" else host, port)
    listeners, missing = [], []
    try:
        listeners.append(wanted.try_listen())
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE or _is_taken_by_us(wanted):
            raise _cannot_listen(wanted, error) from None
        missing.append(wanted)
    if host in DEFAULT_HOSTS:
        beside = TcpAddress("::1", listeners[0].getsockname()[1] if listeners else port)
        try:
            listeners.append(beside.try_listen())
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) not in NO_IPV6:
                missing.append(beside)
    for address in missing:
        log.error(
            "%s is taken by %s: this daemon serves without it, and takes it when it is free. Browsers and curl reach"
            " them there; clients of gpulease send them nothing",
            address,
            other_daemons.described(owner_of_listener((address.host, address.port))),
        )
    return listeners, missing


def _is_taken_by_us(address: TcpAddress) -> bool:
    """True if root or this user listens there. Another user may also have bound the port without listening."""
    return owner_of_listener((address.host, address.port)) in (0, os.geteuid())


def _cannot_listen(address: TcpAddress, error: Exception) -> CannotStart:
    reason, remedy = getattr(error, "strerror", None) or str(error), "Give another --port; 0 takes a free one."
    there = Address(url=f"http://{address}", origin=f"http://{address}")
    other = other_daemons.at(there) if getattr(error, "errno", None) == errno.EADDRINUSE else None
    if other is not None:
        reason, remedy = str(other), "You need none of your own: `gpulease status` shows its GPUs."
    return CannotStart(f"Port {address.port} of {address.host}: {reason}.", remedy=remedy)


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # who listens there may accept no one
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno == errno.EAGAIN
    return True


def listen_unix(path: Path, mode: int) -> socket.socket:
    """A listening Unix socket with this mode.

    A socket file that an earlier daemon left is replaced, since the lock on the data directory is held. Raises
    `CannotStart` if a process listens on it.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        detail = f"The socket path {path} is longer than {SOCKET_PATH_BYTES} bytes."
        raise CannotStart(detail, remedy="Give a shorter --socket.")
    if path.exists():
        if _is_listened_on(path):
            raise CannotStart(f"Another process listens on {path}.", remedy="Give another --socket.")
        if not path.is_socket():
            raise CannotStart(f"{path} is not a socket.", remedy="Move it away, or give another --socket.")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)  # the worker of this host reports before the daemon accepts
    except OSError as error:
        listener.close()
        raise CannotStart(f"{path} cannot be created: {error.strerror}.", remedy="Give another --socket.") from None
    finally:
        os.umask(before)
    closed = next((place for place in path.absolute().parents if not place.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None and mode & stat.S_IWOTH:
        log.info("other users cannot reach %s, because they may not enter %s; they can use loopback TCP", path, closed)
    return listener
