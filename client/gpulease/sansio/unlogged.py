"""httpx2 logs every request at level INFO, into the log of a program that configures logging: ten lines for a lease.
Those of this library's requests are left out; those of others stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_sending: ContextVar[bool] = ContextVar("gpulease_sending", default=False)


@contextmanager
def unlogged() -> Iterator[None]:
    """While a request of this library is sent, by this thread or task."""
    token = _sending.set(True)
    try:
        yield
    finally:
        _sending.reset(token)


logging.getLogger("httpx2").addFilter(lambda record: not _sending.get())
