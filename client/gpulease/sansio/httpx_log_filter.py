"""Keeps this library's own requests out of the log of httpx2.

httpx2 logs every request at level INFO: ten lines for a lease, in each program that configures logging. The requests of
others stay in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_sending: ContextVar[bool] = ContextVar("gpulease_sending", default=False)


@contextmanager
def without_httpx_log() -> Iterator[None]:
    """httpx2 logs nothing of what this thread or task sends in this block."""
    token = _sending.set(True)
    try:
        yield
    finally:
        _sending.reset(token)


logging.getLogger("httpx2").addFilter(lambda record: not _sending.get())
