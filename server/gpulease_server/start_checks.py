"""What is checked before a daemon starts: settings that would fail later, or that would serve no one."""

from __future__ import annotations

import resource
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from gpulease_protocol.host.addresses import candidates
from gpulease_server.listeners import CannotStart
from gpulease_server.settings import ServeSettings

if TYPE_CHECKING:
    from gpulease_server.tls_authority import TlsAuthority

MIN_OPEN_FILES = 128
"""For the database, locks and sockets, and the fewest connections that a daemon serves
(`api.http_limits.raise_connection_limit`)."""


def check_open_files() -> None:
    """Raise `CannotStart` if this process may have too few files open: the daemon would break somewhere."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        detail = f"The daemon may have {hard} files open at most, and needs {MIN_OPEN_FILES}."
        raise CannotStart(detail, remedy="Raise the limit of open files (ulimit -n, LimitNOFILE=).")


def check_simulation(simulate: str | None) -> None:
    """Raise `CannotStart` unless this is a number of GPUs or a file. What the file says is the worker's to check."""
    if simulate is None or (simulate.isdecimal() and int(simulate) > 0) or Path(simulate).is_file():
        return
    detail = f"--simulate {simulate}: neither a number of GPUs over 0 nor a file."
    raise CannotStart(detail, remedy="Use --simulate 4, or see docs/simulation.md for the file.")


def check_tls(settings: ServeSettings) -> None:
    """Raise `CannotStart` if TLS does not work."""
    if settings.tls is not None:
        for option, file in (("--tls-cert", settings.tls.certificate), ("--tls-key", settings.tls.key)):
            try:
                file.read_bytes()
            except OSError as error:
                detail = f"{option} {file} cannot be read: {error.strerror}."
                raise CannotStart(detail, remedy="Give a file in PEM that the daemon's user can read.") from None
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.tls.certificate, settings.tls.key, password=_no_password
            )
        except (OSError, ValueError) as error:  # SSLError is an OSError
            detail = f"{settings.tls.certificate} and {settings.tls.key} do not work for TLS: {error}."
            raise CannotStart(detail, remedy="Give a certificate and its key, in PEM, without a password.") from None


def own_authority(settings: ServeSettings) -> TlsAuthority:
    """The daemon's own certificate authority, with a certificate that is valid. Raises `CannotStart`."""
    try:
        from gpulease_server.tls_authority import TlsAuthority  # noqa: PLC0415 - cryptography takes 100 ms and 10 MiB
    except ModuleNotFoundError as error:
        detail = f"--tls-auto needs the package {error.name}, which is not installed."
        raise CannotStart(detail, remedy="pip install 'gpulease[server]'") from None
    authority = TlsAuthority(settings.tls_directory, (settings.host, *settings.tls_names))
    authority.renew()
    return authority


def check_peers(settings: ServeSettings) -> None:
    """Raise `CannotStart` if the worker that this daemon starts would refuse to report to a peer."""
    peers = candidates(settings.peers) if settings.peers else ()
    unknown = next((peer for peer in peers if not peer.shows_server), None)
    if unknown is not None and settings.worker and "--plain-http" not in settings.worker_options:
        raise CannotStart(
            f"--peer {unknown.shown} is plain HTTP to another host, where nothing shows that a daemon answers.",
            remedy="Use https, or --no-worker and a worker with --plain-http.",
        )


def _no_password() -> str:
    raise ValueError("the key has a password")
