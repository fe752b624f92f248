"""A daemon that serves: its parts, from start to end. `main` imports this last, because it takes longest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host import garbage
from gpulease_protocol.host.logging import fields
from gpulease_protocol.joining import Authority, fingerprint
from gpulease_server import dashboard, systemd_notify
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.app import create_app
from gpulease_server.api.auth.peer_credentials import PeerCredentialsProtocol
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.http_limits import LimitedHttpProtocol, raise_connection_limit
from gpulease_server.api.tls_handshake import TlsListener
from gpulease_server.listeners import BACKLOG, CannotStart, Listeners, TcpAddress
from gpulease_server.local_worker import LocalWorker
from gpulease_server.policy_settings import policy_of
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.group_members import GroupMembers, find_group
from gpulease_server.runtime.idle_notices import IdleNotices
from gpulease_server.runtime.leadership.lock import WriterLock
from gpulease_server.runtime.leadership.standby import Standby
from gpulease_server.runtime.leadership.status import LeadershipStatus
from gpulease_server.runtime.leadership.takeover import take_over
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.runtime.retention import Pruner
from gpulease_server.runtime.writer import Writer
from gpulease_server.settings import CommandVisibility, ServeSettings, Tls
from gpulease_server.start_checks import check_tls
from gpulease_server.store.database import unusable_error
from gpulease_server.store.dialects import READ_THREADS
from gpulease_server.store.ledger_store import Store, Superseded
from gpulease_server.store.retention import RetentionLimits

if TYPE_CHECKING:
    from gpulease_server.tls_authority import TlsAuthority

log = logging.getLogger("gpulease.serve")
RENEW_S = 3600.0
"""Time between two looks at how long the daemon's own certificate is valid."""
RELOAD_S = 10.0
"""Time between two looks at whether the files of the certificate were replaced."""
TAKE_PORT_S = 5.0
"""Time between two attempts to take a port that another user has."""
RESTART_S = 5.0
"""Time from a bug that ends a part of the daemon until that part begins again."""
DATE_S = 1.0
"""Time between two updates of the header `Date`."""
STOP_S = 30.0
"""How long an end may take. A commit or a question to the system that hangs would hold it up forever: no thread can be
ended that waits in the kernel or in a library."""
LOAD_S = 1.0
"""How long callers may wait for the first ledger before they are refused."""


def admin_groups(settings: ServeSettings) -> GroupMembers:
    """The groups of administrators."""
    groups = {admin.removeprefix("@") for admin in settings.admins if admin.startswith("@")}
    for group in sorted(groups):
        if find_group(group) is None:
            log.warning("--admin @%s: this host has no group %s, so no one is an administrator by it", group, group)
    return GroupMembers(groups)


class Serving:
    """A running daemon: its parts, from start to end."""

    def __init__(
        self,
        settings: ServeSettings,
        url: str,
        store: Store,
        lock: WriterLock,
        authority: TlsAuthority | None,
        worker: LocalWorker | None,
    ) -> None:
        self.settings = settings
        self.authority = authority
        self.worker = worker
        self.url = url
        self.node = settings.node
        self.access = AccessSettings(
            admins=frozenset(admin for admin in settings.admins if not admin.startswith("@")),
            behind_proxy=settings.behind_proxy,
            origins=frozenset(settings.cors_origins),
            show_commands=settings.show_commands is CommandVisibility.ALL,
            max_rps_per_user=settings.max_rps_per_user,
        )
        keep = RetentionLimits(
            age_s=settings.keep_days * 24 * 3600.0, ended=settings.keep_ended, events=settings.keep_events
        )
        self.writer = Writer(store, policy_of(settings))
        self.recorder = GpuMetricsRecorder(store, self.writer)
        self.bearer_tokens = BearerTokens(store, self.writer)
        self.pruner = Pruner(store, self.writer, keep)
        self.idle_notices = IdleNotices(self.writer, shlex.split(settings.idle_command), settings.idle_after_s)
        self.leadership = LeadershipStatus(lock)
        self.standby = Standby(lock, store, self.writer, self.leadership, self._take_over)
        self.daemon = DaemonState(
            writer=self.writer,
            store=store,
            tickets=DesiredStateTickets(),
            recorder=self.recorder,
            host=socket.gethostname(),
            local_node=self.node if settings.worker else None,
            leadership=self.leadership,
            access=self.access,
            admin_groups=admin_groups(settings),
            bearer_tokens=self.bearer_tokens,
        )

    def run(self, holder: str | None, listeners: Listeners) -> int:
        """Serve until stopped; as a standby first, while `holder` has the lock."""
        settings, fence = self.settings, self.daemon.store.fence
        if holder is None:
            self._restore()
        else:
            self.standby.begin(holder)
        app = create_app(self.daemon, self._lifespan, self.access.origins, dashboard.routes)
        server = SocketsServer(_config(app, settings.tls), self.daemon, listeners)
        LimitedHttpProtocol.max_connections = raise_connection_limit()
        self.server = server
        self.daemon.address = listeners.outward_address()
        self.daemon.authority = self._shown_authority(listeners)
        fence.on_superseded = self._step_down
        fence.check()  # the callback was not set before
        signal.signal(signal.SIGALRM, _end_at_once)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Before uvicorn takes signals, and after: it raises them again once it has shut down, which by default ends
            # the process without clean-up. Under nohup, SIGHUP stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, server.handle_exit)
        server.run(sockets=listeners.tcp)
        if server.failure is not None:
            raise server.failure
        return 0

    def _shown_authority(self, listeners: Listeners) -> Authority:
        """What a host that joins is told."""
        address, secured = self.daemon.address, self.settings.tls is not None
        port = next((one.getsockname()[1] for one in listeners.tcp), self.settings.port)
        urls = () if address is None or not secured else (f"https://{TcpAddress(address, port)}",)
        certificate = None if self.authority is None else self.authority.certificate
        return Authority(
            certificate=certificate, fingerprint=None if certificate is None else fingerprint(certificate), urls=urls
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(reading_threads())
        parts: list[Callable[[], Awaitable[None]]] = [
            self._write,
            self.writer.keep_reserve,
            self.recorder.run,
            self.pruner.run,
            self.bearer_tokens.maintain,
            self.idle_notices.run,
            systemd_notify.watchdog,
        ]
        if self.authority is not None:
            parts.append(partial(self._renew_certificate, self.authority))
        if self.settings.tls is not None:
            parts.append(partial(self._reload_certificate, self.settings.tls))
        tasks = [asyncio.create_task(_keep_running(part)) for part in parts]
        if self.worker is not None:
            self.server.worker = asyncio.create_task(_keep_running(self.worker.supervise))
            tasks.append(self.server.worker)
        if not self.writer.has_loaded and self.leadership.standby_copy is None:
            # Who asks meanwhile, as the worker does, waits at the sockets; later, they would be refused.
            await self.writer.wakeups.wait("ledger", LOAD_S)
        yield
        for task in reversed(tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        try:
            await self.recorder.save(self.daemon.now(), everything=True)
            await self.bearer_tokens.save_uses()
        finally:
            self.writer.close()

    async def _renew_certificate(self, authority: TlsAuthority) -> None:
        """Renew the certificate of the daemon's own authority in time, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await asyncio.to_thread(authority.renew)
            except CannotStart as error:
                log.error("the certificate cannot be renewed: %s", error)

    async def _reload_certificate(self, tls: Tls) -> None:
        """Give new connections the certificate that has replaced the one before, until cancelled."""
        found: object = None
        while True:
            loaded, found = found, await asyncio.to_thread(_signature, tls)
            context = self.server.config.ssl
            if loaded not in (None, found) and context is not None:
                try:
                    await asyncio.to_thread(check_tls, self.settings)  # else half of it might be taken in
                    context.load_cert_chain(tls.certificate, tls.key)
                    log.info("new connections get the certificate that is in %s now", tls.certificate)
                except (CannotStart, OSError) as error:
                    log.error("the certificate was changed, and the one before is still in use: %s", error)
            await asyncio.sleep(RELOAD_S)

    async def _write(self) -> None:
        """Run the writer; as a standby first if there is another writer."""
        leaving = None
        if self.leadership.standby_copy is not None:
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
        """Load what is stored beside the ledger. Raises `DatabaseUnusable`."""
        try:
            self.recorder.restore()
            self.bearer_tokens.restore()
        except SQLAlchemyError as error:
            raise unusable_error(self.url, error) from error

    def _step_down(self) -> None:
        """End, because another daemon is the writer now. Thread-safe."""
        self.leadership.superseded = True
        self.server.end(
            Superseded(
                "Another daemon has taken over the database, so this one ended.",
                remedy="Use the other one. Start this one again with --standby, or after the other one has ended.",
            )
        )


def _config(app: FastAPI, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else str(tls.key),
        proxy_headers=False,
        http=PeerCredentialsProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        backlog=BACKLOG,
    )


def reading_threads() -> ThreadPoolExecutor:
    """The threads in which routes read the database. By default a host with many processors has more of them than the
    database has connections, and slow reads then kept the writer from its own."""
    return ThreadPoolExecutor(min(READ_THREADS, (os.cpu_count() or 1) + 4), thread_name_prefix="read")


def _signature(tls: Tls) -> list[tuple[int, ...]]:
    """Changes when one of the files is replaced or written; empty for one that cannot be seen."""
    signatures: list[tuple[int, ...]] = []
    for file in (tls.certificate, tls.key):
        try:
            seen = file.stat()
            signatures.append((seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns))
        except OSError:
            signatures.append(())
    return signatures


async def _keep_running(part: Callable[[], Awaitable[None]]) -> None:
    """Run a part of the daemon until it ends or is cancelled. After a bug in it, it begins again."""
    task = asyncio.current_task()
    assert task is not None
    while True:
        try:
            return await part()
        except Exception:
            log.exception("a part of the daemon failed; unless the daemon ends, it begins again in %g s", RESTART_S)
        if task.cancelling():
            return None
        await asyncio.sleep(RESTART_S)


def _bound_end() -> None:
    """From here on the process lasts `STOP_S` at most."""
    if not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, STOP_S)


def _end_at_once(*_: object) -> None:
    log.critical(
        "the end takes longer than %g s, because a commit or a question to the system hangs; it stops waiting. What it"
        " has answered is recorded",
        STOP_S,
        extra=fields(event="daemon.killed"),
    )
    logging.shutdown()  # writes the log
    os._exit(1)


class SocketsServer(uvicorn.Server):
    """uvicorn on TCP and a Unix socket; long polls end when it stops."""

    def __init__(self, config: uvicorn.Config, daemon: DaemonState, listeners: Listeners) -> None:
        super().__init__(config)
        self.daemon = daemon
        self.listeners = listeners
        self.worker: asyncio.Task[None] | None = None
        self.tasks: list[asyncio.Task[None]] = []
        """Those that listen for TLS, or take a port."""
        self.failure: GpuleaseError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        """Set when `should_exit` is."""

    def end(self, failure: GpuleaseError) -> None:
        """End because of a failure. Thread-safe."""
        self.failure, self.should_exit = failure, True
        self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End because of a signal."""
        _bound_end()
        super().handle_exit(sig, frame)
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """Serve until the end. uvicorn's own loop looks for it ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), DATE_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all, and take a port that is missing when it is free."""
        loop: Any = asyncio.get_running_loop()
        self._loop, listeners = loop, self.listeners
        await super().startup([])
        for listener in listeners.tcp:
            await self._listen(listener)
        local = await loop.create_unix_server(self._protocol, sock=listeners.local, backlog=self.config.backlog)
        self.servers.append(local)
        urls = listeners.urls("https" if self.config.ssl else "http")
        log.info("gpulease listens on %s", " and ".join(urls), extra=fields(event="daemon.listens"))
        self.tasks += [asyncio.create_task(self._take(address)) for address in listeners.missing]
        garbage.started()
        systemd_notify.notify("READY=1")

    def _protocol(self) -> PeerCredentialsProtocol:
        return PeerCredentialsProtocol(self.config, self.server_state, self.lifespan.state, asyncio.get_running_loop())

    async def _listen(self, listener: socket.socket) -> None:
        """Serve the connections of a TCP socket."""
        loop: Any = asyncio.get_running_loop()
        if (context := self.config.ssl) is not None:
            self.tasks.append(loop.create_task(TlsListener(listener, context, self._protocol).run()))
        else:
            self.servers.append(await loop.create_server(self._protocol, sock=listener, backlog=BACKLOG))

    async def _take(self, address: TcpAddress) -> None:
        """Listen on an address that another user has, once they have left it."""
        while True:
            await asyncio.sleep(TAKE_PORT_S)
            with contextlib.suppress(OSError):
                listener = address.try_listen()
                break
        await self._listen(listener)
        log.warning("gpulease listens on %s now", address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the worker and the long polls, then the rest."""
        _bound_end()
        systemd_notify.notify("STOPPING=1")
        for task in self.tasks:
            task.cancel()
        if self.worker is not None:
            self.worker.cancel()
            await asyncio.wait([self.worker])
        self.daemon.stopping.set()
        self.daemon.writer.wakeups.wake_all()
        await super().shutdown(sockets)
