"""`gpulease serve`: one daemon, from its data directory to its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from gpulease.addresses import default_data_dir, let_through
from gpulease.errors import GpuleaseError
from gpulease.log_lines import LogFormat, LogLevel, fields, logging_to_stderr

from . import dashboard, notify
from .api.app import create_app
from .api.callers import Access
from .api.connection import BoundedProtocol, connections_allowed
from .api.daemon import Daemon
from .api.peer import PeerProtocol
from .core.quota import Limits
from .core.turn import DESKTOP_NAMES, MONITOR_NAMES, Policy
from .local_worker import keep_worker
from .runtime.bearers import Bearers
from .runtime.lock import OneDaemon, WriterLock, take, this_process, writer_lock
from .runtime.recorder import Recorder
from .runtime.retention import Pruner
from .runtime.standby import Standby
from .runtime.standing import Standing
from .runtime.tickets import Tickets
from .runtime.writer import Writer
from .store.database import database_file, shown, unusable, upgrade
from .store.retention import Keep
from .store.store import Store, Superseded

log = logging.getLogger("gpulease.serve")
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (unix(7))."""


class CannotStart(GpuleaseError):
    """The daemon cannot start as it was told to."""

    code, title = "cannot_start", "Cannot start"


@dataclass(frozen=True, slots=True)
class Tls:
    """The files that TLS needs, PEM."""

    certificate: Path
    """The certificate, and those that lead from it to its authority."""
    key: Path
    """Its private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What `gpulease serve` was told."""

    host: str = "127.0.0.1"
    """Address to listen on; other than loopback only with TLS or behind a proxy."""
    port: int = 8750
    """TCP port; 0 takes a free one."""
    socket: Path | None = None
    """Unix socket; `gpulease.sock` in the data directory when None."""
    socket_mode: int = 0o666
    """Who may connect to it; what each may do then is decided by who he is."""
    tls: Tls | None = None
    """Speak TLS on TCP."""
    access: Access = field(default_factory=Access)
    """What is set about callers."""
    limits: Limits = field(default_factory=Limits)
    """What one user may have."""
    database_url: str | None = None
    """`sqlite:///FILE` or `postgresql://...`; `gpulease.db` in the data directory when None."""
    data_dir: Path | None = None
    """Everything the daemon keeps; a place by user when None."""
    worker: bool = True
    """Run a worker for this host."""
    simulate: str | None = None
    """Simulated GPUs for that worker: a number, or a JSON file."""
    node: str | None = None
    """Name of this host's node; the host name when None."""
    desktop_names: tuple[str, ...] = ()
    """Programs of a desktop, beside those that `core.turn.DESKTOP_NAMES` lists."""
    monitor_names: tuple[str, ...] = ()
    """Programs that have device files open only to watch, beside those that `core.turn.MONITOR_NAMES` lists."""
    retained_memory_s: float = 30.0
    """How long memory that the driver alone still holds, or a stranger's open device file, keeps a draining GPU."""
    worker_options: tuple[str, ...] = ()
    """What that worker is told beside its place, its name and the form of its log."""
    standby: bool = False
    """Stand by while another daemon is the writer of the database, and take over when it is gone."""
    peers: tuple[str, ...] = ()
    """Addresses of the other daemons on this database, to which that worker reports while this one does not serve."""
    max_bypass: int = 10
    """How often a waiting request may be passed before GPUs are held for it, see `core.bypass`."""
    max_bypass_s: float = 300.0
    """For how long from the first time on it may be passed."""
    max_observation_age_s: float = 0.5
    """How old a reading may be that a grant rests on, see `core.gpu.is_fresh`."""
    keep: Keep = field(default_factory=Keep)
    """What is kept of what is over."""
    log_format: LogFormat = LogFormat.AUTO
    """The form of the log of daemon and worker."""
    log_level: LogLevel = LogLevel.INFO
    """The least that is logged there."""


def serve(settings: ServeSettings) -> int:
    """Run a daemon until SIGTERM or SIGINT. Returns the exit code. Raises `GpuleaseError` when it cannot start."""
    with logging_to_stderr("serve", settings.log_format, settings.log_level):
        return _serve(settings)


def _serve(settings: ServeSettings) -> int:
    check_simulation(settings.simulate)
    check_exposure(settings)
    data_dir = (settings.data_dir or default_data_dir()).absolute()
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        let_through(data_dir)
    except OSError as error:
        raise CannotStart(f"{data_dir} cannot be made: {error.strerror}.", remedy="Give another --data-dir.") from None
    url = settings.database_url or f"sqlite:///{data_dir / 'gpulease.db'}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(OneDaemon(data_dir / "daemon.lock", str(data_dir), "--data-dir"))
        lock = stack.enter_context(contextlib.closing(writer_lock(url)))
        holder = None
        if settings.standby:
            holder = _stand_by(lock, url)
        else:
            take(lock)
        tcp = stack.enter_context(listen_tcp(settings.host, settings.port))
        path = settings.socket or data_dir / "gpulease.sock"
        local = stack.enter_context(listen_unix(path, settings.socket_mode))
        stack.callback(path.unlink, missing_ok=True)
        store = stack.enter_context(contextlib.closing(Store(url)))
        if holder is None:
            lock.keep(store.term.check)
            take_over(store, url)
        return _Serving(settings, data_dir, url, store, lock).run(holder, tcp, local, path)


def _stand_by(lock: WriterLock, url: str) -> str | None:
    """Who has the lock; None if this daemon has now. Raises `CannotStart` where nobody can stand by."""
    if database_file(url) is not None:
        raise CannotStart(
            "--standby needs PostgreSQL: SQLite's database is in the directory of one daemon.",
            remedy="Give --database-url postgresql://..., see docs/databases.md.",
        )
    return lock.try_take()


def take_over(store: Store, url: str) -> None:
    """Bring the database, whose lock is held, up to date, and become its writer. Raises `DatabaseUnusable`."""
    file = database_file(url)
    if file is not None:
        with contextlib.suppress(OSError):  # if it cannot be made, the next line says why
            file.touch(mode=0o600)
            file.chmod(0o600)  # it holds the environments of jobs
    upgrade(url)
    try:
        store.term.evict()
        log.info("writes to %s in term %d", shown(url), store.term.take_over(this_process()))
    except SQLAlchemyError as error:
        raise unusable(url, error) from error


def check_simulation(simulate: str | None) -> None:
    """Raise `CannotStart` unless this is a number of GPUs or a file. What the file says is the worker's to check."""
    if simulate is None or (simulate.isdecimal() and int(simulate) > 0) or Path(simulate).is_file():
        return
    detail = f"--simulate {simulate}: neither a number of GPUs over 0 nor a file."
    raise CannotStart(detail, remedy="Use --simulate 4, or see docs/simulation.md for the file.")


def check_exposure(settings: ServeSettings) -> None:
    """Raise `CannotStart` if tokens would pass over a network in the clear, or TLS cannot be spoken."""
    if settings.host not in LOOPBACK and settings.tls is None and not settings.access.behind_proxy:
        raise CannotStart(
            f"{settings.host} is not a loopback address, and without TLS anybody on the way reads the callers' tokens.",
            remedy="Give --tls-cert and --tls-key, or --behind-proxy where a proxy speaks TLS, or use --host 127.0.0.1"
            " and ssh -L.",
        )
    if settings.tls is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.tls.certificate, settings.tls.key, password=_no_password
            )
        except (OSError, ValueError) as error:  # SSLError is an OSError
            detail = f"{settings.tls.certificate} and {settings.tls.key} are of no use for TLS: {error}."
            raise CannotStart(detail, remedy="Give a certificate and its key, in PEM, without a password.") from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def listen_tcp(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `CannotStart` for an address that is not this host's or a port that is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotStart(
            f"Port {port} of {host}: {reason}.", remedy="Give another --port; 0 takes a free one."
        ) from None
    return listener


def listen_unix(path: Path, mode: int) -> socket.socket:
    """A bound Unix socket that those can open whom its mode names.

    The lock on the data directory is held, so a file that is left over belongs to nobody, unless another daemon answers
    on it: then raises `CannotStart`.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        detail = f"The socket path {path} is longer than {SOCKET_PATH_BYTES} bytes."
        raise CannotStart(detail, remedy="Give a shorter --socket.")
    if path.exists():
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise CannotStart(f"Another process listens on {path}.", remedy="Give another --socket.")
        if not path.is_socket():
            raise CannotStart(f"{path} is not a socket.", remedy="Move it away, or give another --socket.")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise CannotStart(f"{path} cannot be made: {error.strerror}.", remedy="Give another --socket.") from None
    finally:
        os.umask(before)
    closed = next((place for place in path.absolute().parents if not place.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None and mode & stat.S_IWOTH:
        log.info("other users do not reach %s, because they may not enter %s; they have loopback TCP", path, closed)
    return listener


def node_name(given: str | None) -> str:
    """The name of this host's node, in characters that an address can carry."""
    return given or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:255] or "localhost"


class _Serving:
    """What runs between the start of a daemon and its end."""

    def __init__(self, settings: ServeSettings, data_dir: Path, url: str, store: Store, lock: WriterLock) -> None:
        self.settings = settings
        self.data_dir = data_dir
        self.url = url
        self.node = node_name(settings.node)
        policy = Policy(
            desktop_names=DESKTOP_NAMES.union(settings.desktop_names),
            monitor_names=MONITOR_NAMES.union(settings.monitor_names),
            max_bypass=settings.max_bypass,
            max_bypass_s=settings.max_bypass_s,
            max_observation_age_s=settings.max_observation_age_s,
            retained_memory_s=settings.retained_memory_s,
            limits=settings.limits,
            show_commands=settings.access.show_commands,
            node_lifetime_s=settings.keep.age_s,
        )
        self.writer = Writer(store, policy)
        self.recorder = Recorder(store, self.writer)
        self.bearers = Bearers(store, self.writer)
        self.pruner = Pruner(store, self.writer, settings.keep)
        self.standing = Standing(lock)
        self.standby = Standby(lock, store, self.writer, self.standing, self._take_over)
        self.daemon = Daemon(
            writer=self.writer,
            store=store,
            tickets=Tickets(),
            recorder=self.recorder,
            host=socket.gethostname(),
            local_node=self.node if settings.worker else None,
            standing=self.standing,
            access=settings.access,
            bearers=self.bearers,
        )

    def run(self, holder: str | None, tcp: socket.socket, local: socket.socket, path: Path) -> int:
        """Serve until told to end; stand by first, while `holder` has the lock."""
        settings, term = self.settings, self.daemon.store.term
        if holder is None:
            self._restore()
        else:
            self.standby.begin(holder)
        app = create_app(self.daemon, self._lifespan, settings.access.origins, dashboard.routes)
        server = TwoSocketServer(_config(app, settings.tls), self.daemon, local)
        BoundedProtocol.max_connections = connections_allowed()
        self.server, self.addresses = server, (f"unix://{path}", *settings.peers)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.tls is None else "https"
        server.announce = f"gpulease listens on {scheme}://{host}:{tcp.getsockname()[1]} and unix://{path}"
        term.on_superseded = self._step_down
        term.check()  # nobody was told of what happened before
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again once it has shut down; by default that ends the process without clean-up.
            signal.signal(number, lambda *_: None)
        server.run(sockets=[tcp])
        if server.failure is not None:
            raise server.failure
        return 0

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        settings = self.settings
        parts = (self._write(), self.recorder.run(), self.pruner.run(), self.bearers.note_uses(), notify.watchdog())
        tasks = [asyncio.create_task(part) for part in parts]
        if settings.worker:
            place = self.data_dir / "worker"
            logs = ("--log-format", settings.log_format, "--log-level", settings.log_level)
            options = (*logs, *settings.worker_options)
            keeping = keep_worker(self.addresses, place, self.node, settings.simulate, options)
            self.server.worker = asyncio.create_task(keeping)
            tasks.append(self.server.worker)
        yield
        for task in reversed(tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.recorder.save(self.daemon.now().mono_s, everything=True)
        await self.bearers.save_uses()
        self.writer.close()

    async def _write(self) -> None:
        """Be the writer, after standing by where that is to be done first."""
        leaving = None
        if self.standing.copy is not None:
            try:
                await self.standby.run()
            except GpuleaseError as error:
                self.server.end(error)
                return
            leaving = asyncio.create_task(self.standby.leave())
        try:
            await self.writer.run()
        finally:
            if leaving is not None:
                leaving.cancel()

    def _take_over(self) -> None:
        take_over(self.daemon.store, self.url)
        self._restore()

    def _restore(self) -> None:
        """Read what is kept beside the ledger."""
        self.recorder.restore()
        self.bearers.restore()

    def _step_down(self) -> None:
        """End, because another daemon is the writer now. From any thread."""
        self.standing.superseded = True
        self.server.end(
            Superseded(
                "Another daemon has taken over the database, so this one has ended. Nothing that it answered is lost.",
                remedy="Use the other one; this one can be started again with --standby, or when that has ended.",
            )
        )


def _config(app: FastAPI, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else str(tls.key),
        proxy_headers=False,
        http=PeerProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        backlog=2048,
    )


class TwoSocketServer(uvicorn.Server):
    """uvicorn on a TCP and a Unix socket, whose long polls end when it is told to stop."""

    def __init__(self, config: uvicorn.Config, daemon: Daemon, local: socket.socket) -> None:
        super().__init__(config)
        self.daemon = daemon
        self.local = local
        self.announce = ""
        self.worker: asyncio.Task[None] | None = None
        self.failure: GpuleaseError | None = None

    def end(self, failure: GpuleaseError) -> None:
        """End because of a failure. From any thread."""
        self.failure, self.should_exit = failure, True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on both."""
        await super().startup(sockets)

        def protocol() -> asyncio.Protocol:
            return PeerProtocol(self.config, self.server_state, self.lifespan.state, asyncio.get_running_loop())

        loop: Any = asyncio.get_running_loop()
        self.servers.append(await loop.create_unix_server(protocol, sock=self.local, backlog=self.config.backlog))
        log.info(self.announce, extra=fields(event="daemon.listens"))
        notify.tell("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the worker and the long polls, then the rest."""
        notify.tell("STOPPING=1")
        if self.worker is not None:
            self.worker.cancel()
            await asyncio.wait([self.worker])
        self.daemon.stopping.set()
        self.daemon.writer.topics.wake_all()
        await super().shutdown(sockets)
