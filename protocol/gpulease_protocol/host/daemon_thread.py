"""Calls that may hang in the kernel, as a read of another user's file system may: each in a thread of its own.

A daemon thread, and not one of an executor, which the interpreter would wait for at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[..., Result], *arguments: object) -> Future[Result]:
    """Call a function in a thread of its own; the future of its result."""
    work = Future[Result]()
    work.set_running_or_notify_cancel()  # so that no one who stops waiting ends it before its thread does

    def call() -> None:
        try:
            work.set_result(function(*arguments))
        except BaseException as error:
            work.set_exception(error)

    threading.Thread(target=call, name="log reader", daemon=True).start()
    return work
