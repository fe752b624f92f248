"""Addresses of the daemon: as given, else from the environment, else the sockets and the port of this machine."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import config_file
from gpulease_protocol.lazy_dataclass import dataclass

SOCKET_NAME = "gpulease.sock"
"""Name of the Unix socket in a daemon's data directory."""
DEFAULT_URL = "http://127.0.0.1:8750"
"""Where `gpulease serve` listens by default."""
HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
MAX_ADDRESSES = 16
"""Addresses of one service, at most: they share the time in which a client finds out that none answers."""
SYSTEM_DATA_DIR = Path("/var/lib/gpulease")
"""Data directory of a daemon that runs as root. Where it exists, clients look for its daemon nowhere else."""


@dataclass(frozen=True, slots=True)
class Address:
    """One place where a daemon may listen."""

    url: str
    """As a person writes it: `http://127.0.0.1:8750` or `unix:///run/gpulease.sock`."""
    origin: str
    """What requests are addressed to; for a Unix socket a name that nothing resolves."""
    socket: Path | None = None
    """The Unix socket to connect to; null for TCP."""

    @property
    def shown(self) -> str:
        """`url` for people to read: a password in it is left out."""
        return re.sub(r"(//[^/@]*?:)[^/@]*@", r"\1...@", self.url)

    @property
    def shows_server(self) -> bool:
        """True if it shows who answers there: by the kernel on this host, else by the certificate of https."""
        return self.local or self.origin.startswith("https:")

    @property
    def local(self) -> bool:
        """True when a proxy can have no part in reaching it."""
        return self.socket is not None or urlsplit(self.origin).hostname in ("127.0.0.1", "::1", "localhost")


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Data directory of a daemon that the current user starts: `/var/lib/gpulease` for root, else a user's own."""
    if os.geteuid() == 0:
        return SYSTEM_DATA_DIR
    home = environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if home.startswith("~"):  # no HOME, and the system does not know this user: a container's, for example
        return SYSTEM_DATA_DIR
    return Path(home) / "gpulease"


def parse(url: str, source: str = "url") -> Address:
    """The address that `url` spells; `host:port` alone is http.

    Raises InvalidRequest, naming `source`, for anything but http, https and unix.
    """
    if HOST_AND_PORT.fullmatch(url.strip()):
        url = f"http://{url.strip()}"
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # reading it is what checks it
    except ValueError as error:
        raise _not_an_address(url, source) from error
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return unix(Path(unquote(parts.path)))
    if parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment:
        return Address(url=url, origin=url.strip().rstrip("/"))
    raise _not_an_address(url, source)


def unix(path: Path) -> Address:
    """The address of a Unix socket."""
    return Address(url=f"unix://{quote(str(path))}", origin="http://gpulease", socket=path)


def candidates(
    url: str | Iterable[str] | None = None, environ: Mapping[str, str] = os.environ, source: str = "url"
) -> tuple[Address, ...]:
    """Addresses to try, in order: `url`, else GPULEASE_URL, else the configuration file's, else a local socket of this
    user's own that exists, and then the system's socket, or loopback on a host without a system's data directory.

    Any user can take the port while no daemon listens there, as during a restart. So a client never changes from
    the system's socket, which only root can make, to the port.

    Several addresses of one service are a list, or one text with commas. Raises InvalidRequest for what is no address,
    naming `source` as the place of `url`, and for a configuration file that cannot be used.
    """
    if url:
        return _several(url, source)
    if environ.get("GPULEASE_URL"):
        return _several(environ["GPULEASE_URL"], "GPULEASE_URL")
    configured = config_file.client(environ).get("url")
    if configured:
        return _several(configured, "url in the configuration file")
    own, systems = default_data_dir(environ), SYSTEM_DATA_DIR
    last = unix(systems / SOCKET_NAME) if has_system_socket() else parse(DEFAULT_URL)
    first = unix(own / SOCKET_NAME)
    return (first, last) if first != last and _is_socket(own / SOCKET_NAME) else (last,)


def for_joining(url: str, source: str) -> tuple[Address, ...]:
    """The addresses at which a host may join a daemon. Raises InvalidRequest, naming `source`, for any that does not
    show who answers."""
    found = _several(url, source)
    for one in found:
        if not one.shows_server:
            detail = f"{source}: {one.shown} is plain HTTP to another host, where nothing shows who answers."
            raise InvalidRequest(detail, remedy="Use its https address; `gpulease node add` prints it.")
    return found


def has_system_socket() -> bool:
    """True on a host with a data directory of the system's that this user may enter."""
    return owner_of_system_data_dir() is not None and os.access(SYSTEM_DATA_DIR, os.X_OK)


def owner_of_system_data_dir() -> int | None:
    """The user to whom root has given the system's data directory; None where there is none that root has made."""
    try:
        parent, found = SYSTEM_DATA_DIR.parent.stat(), SYSTEM_DATA_DIR.lstat()
    except OSError:
        return None
    made_by_root = parent.st_uid == 0 and not parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid if made_by_root and stat.S_ISDIR(found.st_mode) else None


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # in a directory that this user may not enter
        return False


def _several(urls: str | Iterable[str], source: str) -> tuple[Address, ...]:
    words = urls.split(",") if isinstance(urls, str) else list(urls) if isinstance(urls, Iterable) else [urls]
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise _not_an_address(wrong[0], source)
    found = dict.fromkeys(parse(word.strip(), source) for word in words if word.strip())
    if not found or len(found) > MAX_ADDRESSES:
        raise InvalidRequest(
            f"{source}: {len(found)} addresses were given.", remedy=f"Give 1 to {MAX_ADDRESSES}, with commas between."
        )
    return tuple(found)


def _not_an_address(url: object, source: str) -> InvalidRequest:
    return InvalidRequest(
        f"{source}: {url!r} is not the address of a daemon.",
        remedy=f"Write it like {DEFAULT_URL} or unix:///path/to/{SOCKET_NAME}.",
    )


def prepare_data_directory(directory: Path) -> None:
    """Make a data directory, and let users reach the directories of their jobs below it. It stays closed to listing.

    Only a directory that is root's alone is changed: other permissions were given on purpose. Raises OSError, also for
    one that another user owns, who could put what they like in place of what is kept there.
    """
    from gpulease_protocol.host.tcp_socket_owner import is_overflow_uid  # noqa: PLC0415 - clients have no such directory

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = directory.stat()
    if seen.st_uid not in (0, os.geteuid()) and not is_overflow_uid(seen.st_uid):
        raise PermissionError(
            errno.EPERM, f"it belongs to another user (uid {seen.st_uid}), who could replace what is in it"
        )
    if seen.st_uid == os.geteuid() == 0 and stat.S_IMODE(seen.st_mode) == 0o700:
        directory.chmod(0o711)
