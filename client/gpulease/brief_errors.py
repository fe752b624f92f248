"""Errors in one look: the traceback of the library's errors is the caller's line, one of this module, and one sentence.

What happened in between (retries, sockets, the daemon's answer in its raw form) says nothing to the caller, and
Python would print it as a chain of tracebacks. The whole traceback goes to the logger `gpulease` at level DEBUG. Errors
that are not the library's, such as a mistake in it, keep theirs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from gpulease_protocol.errors import GpuleaseError

LOG = logging.getLogger("gpulease")

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def brief_errors(function: Function) -> Function:
    """The same function, with a short traceback for its errors and for Ctrl-C."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (GpuleaseError, KeyboardInterrupt) as error:
            raise _shortened(error) from None  # the logger "gpulease" has the whole traceback, at level DEBUG

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        from asyncio import CancelledError  # noqa: PLC0415 - loads slowly, and only an event loop comes here

        try:
            return await function(*args, **kwargs)
        except (GpuleaseError, KeyboardInterrupt, CancelledError) as error:
            raise _shortened(error) from None  # the logger "gpulease" has the whole traceback, at level DEBUG

    return cast("Function", call_async if inspect.iscoroutinefunction(function) else call)


def brief_errors_of(cls: Class) -> Class:
    """A class decorator: `brief_errors` for every public method but generators."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and not name.startswith("_") and not inspect.isgeneratorfunction(member):
            setattr(cls, name, brief_errors(member))
    return cls


def _shortened(error: BaseException) -> BaseException:
    LOG.debug("Raised:", exc_info=error)
    return error.with_traceback(None)
