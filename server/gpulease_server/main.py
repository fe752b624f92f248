"""`gpulease serve`: one daemon, from its data directory to its sockets.

In this order: what is wrong with the settings, the locks, the sockets, the database, the worker of this host. Only then
is `serving` imported, which takes as long as all of that, and as long as the worker takes to read its GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from gpulease_protocol.host.addresses import prepare_data_directory
from gpulease_protocol.host.logging import fields, logging_to_stderr
from gpulease_server import other_daemons
from gpulease_server.database_settings import default_database_url
from gpulease_server.listeners import CannotStart, Listeners, check_exposure, opened
from gpulease_server.local_worker import LocalWorker
from gpulease_server.runtime.leadership.lock import FileLock, WriterLock, acquire_or_raise, writer_lock
from gpulease_server.runtime.leadership.takeover import take_over
from gpulease_server.settings import ServeSettings
from gpulease_server.socket_activation import is_activated
from gpulease_server.start_checks import check_open_files, check_peers, check_simulation, check_tls, own_authority
from gpulease_server.store.database import database_file
from gpulease_server.store.ledger_store import Store

log = logging.getLogger("gpulease.serve")
SWITCH_S = 0.0005
"""How long a thread that computes keeps the interpreter from the event loop, and the event loop from a thread."""


def serve(settings: ServeSettings) -> int:
    """Run a daemon until SIGTERM or SIGINT. Returns the exit code. Raises `GpuleaseError` when it cannot start."""
    sys.setswitchinterval(SWITCH_S)
    with logging_to_stderr("serve", settings.log_format, settings.log_level):
        code = _serve(settings)
        log.info("gpulease has stopped", extra=fields(event="daemon.stopped"))
        return code


def _serve(settings: ServeSettings) -> int:
    check_open_files()
    check_simulation(settings.simulate)
    check_exposure(settings, settings.host)
    if not settings.tls_auto:
        check_tls(settings)
    check_peers(settings)
    data_dir = settings.data_dir.absolute()
    try:
        prepare_data_directory(data_dir)
    except OSError as error:
        detail = f"{data_dir} cannot be used: {error.strerror}."
        raise CannotStart(detail, remedy="Give another --data-dir.") from None
    url = settings.database_url or default_database_url(data_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FileLock(data_dir / "daemon.lock", str(data_dir), "--data-dir"))
        authority = own_authority(settings) if settings.tls_auto else None
        lock = stack.enter_context(contextlib.closing(writer_lock(url)))
        holder = None
        if settings.standby:
            holder = _stand_by(lock, url)
        else:
            acquire_or_raise(lock)
            # If systemd holds the usual addresses, this daemon would find itself there.
            others = () if is_activated() else other_daemons.usual_addresses()
            if (other := other_daemons.first_of(others)) is not None:
                log.warning("%s; what its worker has claimed is not leased here (`gpulease status`)", other)
        listeners = stack.enter_context(opened(settings, data_dir))
        store = stack.enter_context(contextlib.closing(Store(url)))
        if holder is None:
            lock.keep_alive(store.fence.check)
            take_over(store, url)
        worker = stack.enter_context(_worker(settings, listeners)) if settings.worker else None
        if worker is not None:
            worker.start()
        from gpulease_server.deferred_models import deferred_models  # noqa: PLC0415 - imports pydantic

        with deferred_models():
            from gpulease_server.serving import Serving  # noqa: PLC0415 - the worker starts meanwhile
        return Serving(settings, url, store, lock, authority, worker).run(holder, listeners)


def _stand_by(lock: WriterLock, url: str) -> str | None:
    """Try the lock; returns its holder, or None if this daemon has it now. Raises `CannotStart` for SQLite."""
    if database_file(url) is not None:
        raise CannotStart(
            "--standby needs PostgreSQL: an SQLite database belongs to the data directory of one daemon.",
            remedy="Give --database-url postgresql://..., see docs/databases.md.",
        )
    return lock.try_acquire()


def _worker(settings: ServeSettings, listeners: Listeners) -> LocalWorker:
    """The worker of this host, which reports to this daemon first."""
    addresses = (f"unix://{listeners.path}", *settings.peer_urls)
    logs = ("--log-format", settings.log_format, "--log-level", settings.log_level)
    place = settings.data_dir.absolute() / "worker"
    return LocalWorker(addresses, place, settings.node, settings.simulate, (*logs, *settings.worker_options))
