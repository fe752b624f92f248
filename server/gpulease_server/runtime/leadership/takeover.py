"""Becomes the writer of a database, once its lock is held."""

from __future__ import annotations

import contextlib
import logging

from sqlalchemy.exc import SQLAlchemyError

from gpulease_server.runtime.leadership.lock import FileLock, acquire_or_raise, this_process, writer_lock
from gpulease_server.store.database import database_file, is_newest, redacted, unusable_error, upgrade
from gpulease_server.store.file_guard import require_own_log, start_on_backup
from gpulease_server.store.ledger_store import Store

log = logging.getLogger("gpulease.serve")


def take_over(store: Store, url: str) -> None:
    """Upgrade the schema and become the writer. The lock must be held. Raises `DatabaseUnusable`."""
    file = database_file(url)
    if file is not None:
        require_own_log(file)
        with contextlib.suppress(OSError):  # if this fails, the upgrade reports it
            file.touch(mode=0o600)
            file.chmod(0o600)  # it contains the environments of jobs
    try:
        if file is not None:
            start_on_backup(store.engine, file)
        upgrade(url)
        store.fence.end_open_transaction()
        log.info("writing to %s in term %d", redacted(url), store.fence.take_over(this_process()))
    except SQLAlchemyError as error:
        raise unusable_error(url, error) from error


def upgrade_alone(url: str) -> None:
    """Upgrade the schema, unless a daemon works with the present one. Raises `AlreadyRunning` or `DatabaseUnusable`."""
    file = database_file(url)
    if file is not None:
        require_own_log(file)
    if is_newest(url):
        return
    with contextlib.closing(writer_lock(url)) as lock:
        # Without its file there is no daemon. It is the daemon's to make: another user's would keep the daemon out.
        if not isinstance(lock, FileLock) or lock.path.exists():
            acquire_or_raise(lock)
            lock.keep_alive(lambda: None)
        if file is not None:
            with contextlib.closing(Store(url)) as store:
                start_on_backup(store.engine, file)
        upgrade(url)
