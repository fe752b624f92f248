"""`GPUExecutor`: a `concurrent.futures.Executor` whose calls run on leased GPUs, each in a process of its own.

One lease and one process for each task. A process that has used CUDA stays bound to its GPUs, and whoever waits in the
daemon's queue must come to his turn: so no process, and no lease, outlives its task. It costs a start of Python for
each (0.1 s, and what the task imports), which is little beside a training.

- The process is new (`spawn`), and has the lease's variables (`CUDA_VISIBLE_DEVICES` and the others) in its environment
  before it imports anything of the caller's. Function, arguments and result are pickled; the arguments when `submit` is
  called.
- A task waits in the daemon's queue like everybody else, and only `max_workers` of them at a time. Cancelling its
  future takes it out of the queue. A task that runs cannot be cancelled.
- A task fails alone. An error comes back with its traceback as its cause; a process that dies is `ProcessDied`, for its
  own future only. A lease that is lost ends its process, and the future has `LeaseLost`.
- The GPUs are given back when the process has ended, and before the future has its result.
- Ctrl-C in the block, or while it waits at its end, ends what runs. So does the end of the program: one that ends
  without `shutdown` has nobody left who wants the results. If this process is killed, the kernel kills those of the
  tasks.
"""

from __future__ import annotations

import atexit
import math
import pickle
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing import spawn
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from gpulease.client import Client
from gpulease.errors import InvalidRequest
from gpulease.task_loop import Task, TaskLoop
from gpulease.task_process import GRACE_S, ProcessDied, TaskTraceback

__all__ = ["GPUExecutor", "ProcessDied", "TaskTraceback"]

P = ParamSpec("P")
T = TypeVar("T")

MAX_WORKERS = 1024
"""Tasks that one executor asks for or runs at a time, at most."""

TTL_S = 60.0
"""How soon the GPUs are free again if this process dies where the daemon cannot see it."""

_loops: weakref.WeakSet[TaskLoop] = weakref.WeakSet()


class GPUExecutor(Executor):
    """Runs each call in a process bound to GPUs of its own.

        with gpulease.GPUExecutor(gpus_per_task=2) as executor:
            losses = list(executor.map(train, learning_rates))

    `max_workers`: tasks at a time, by default as many as this node's GPUs are enough for. `wait_s`: how long each waits
    in the queue before its future has NotNow; null for ever. `label` is shown to whoever waits. `progress` draws a bar
    on stderr (needs rich). `mp_context` is there for the likeness to ProcessPoolExecutor, and can only be "spawn".

    Raises DaemonUnavailable when no daemon answers, InvalidRequest for arguments that mean nothing, ImportError when
    `progress` is asked for without rich.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        gpus_per_task: int = 1,
        *,
        client: Client | None = None,
        wait_s: float | None = None,
        label: str = "",
        progress: bool = False,
        mp_context: str | BaseContext | None = None,
    ) -> None:
        _check(max_workers, gpus_per_task, mp_context)
        bar = _bar(label) if progress else None
        asking = client or Client()
        try:
            node, gpus = _this_node(asking)
        finally:
            if client is None:
                asking.close()
        wishes = {
            "count": gpus_per_task,
            "ttl_s": TTL_S,
            "wait_s": math.inf if wait_s is None else wait_s,
            "label": label,
            "node": node,
        }
        self._bar = bar
        self._tasks = TaskLoop(
            asking.destination,
            max_workers or max(1, gpus // gpus_per_task),
            wishes,
            bar or _unseen,
        )
        _loops.add(self._tasks)
        # An executor that nobody has any more takes on nothing; what it has taken on it finishes.
        weakref.finalize(self, self._tasks.close).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of `fn(*args, **kwargs)`. What cannot be pickled is its error. Raises RuntimeError after
        `shutdown`, and in a main module that does this while it is imported."""
        name = getattr(fn, "__qualname__", repr(fn))
        preparation = spawn.get_preparation_data(name)
        preparation["authkey"] = bytes(preparation["authkey"])
        try:
            content = pickle.dumps((fn, args, kwargs))
        except Exception as error:
            refused: Future[T] = Future()
            refused.set_exception(_unsendable(name, error))
            return refused
        task = Task(pickle.dumps((preparation, content)), name)
        self._tasks.put(task)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take on no more. `wait` until all is done; `cancel_futures` that do not run yet. Ctrl-C ends what runs."""
        try:
            self._tasks.close(cancel_futures)
            if not wait:
                return
            self._tasks.join()
        except BaseException:
            self._end()
            raise
        self._close_bar()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self._end()
        else:
            self.shutdown()

    def _end(self) -> None:
        self._tasks.end()
        self._tasks.join(GRACE_S * 3)
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _unseen(total: int, done: int) -> None:
    """Progress that nobody has asked for."""


class _Bar:
    """A progress bar of rich, on stderr."""

    def __init__(self, progress: Any, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label or "tasks", total=0)
        progress.start()

    def __call__(self, total: int, done: int) -> None:
        self._progress.update(self._task, total=total, completed=done)

    def close(self) -> None:
        self._progress.stop()


def _bar(label: str) -> _Bar:
    try:
        from rich.console import Console  # noqa: PLC0415 - only who asks for a bar needs rich
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("progress=True needs rich. Install it with: pip install rich") from error
    console = Console(stderr=True)
    return _Bar(
        Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), console=console), label
    )


def _check(max_workers: int | None, gpus_per_task: int, mp_context: str | BaseContext | None) -> None:
    if max_workers is not None and not 1 <= max_workers <= MAX_WORKERS:
        raise InvalidRequest(f"max_workers: must be 1 to {MAX_WORKERS}, not {max_workers}.")
    if isinstance(gpus_per_task, bool) or not isinstance(gpus_per_task, int) or gpus_per_task < 1:
        raise InvalidRequest(f"gpus_per_task: must be a whole number over 0, not {gpus_per_task!r}.")
    method = mp_context.get_start_method() if isinstance(mp_context, BaseContext) else mp_context
    if method not in (None, "spawn"):
        raise InvalidRequest(
            f"mp_context: {method!r} would hand the parent's CUDA state to the task.", remedy='Use "spawn", or none.'
        )


def _this_node(client: Client) -> tuple[str | None, int]:
    """Name of the node that is this host, and how many GPUs it has; None where the daemon does not know it so."""
    host = socket.gethostname()
    gpus = client.gpus()
    names = sorted({gpu.node for gpu in gpus} & {node.name for node in client.nodes() if node.host == host})
    name = host if host in names else names[0] if names else None
    return name, sum(gpu.node == name for gpu in gpus)


def _unsendable(name: str, error: Exception) -> TypeError:
    sentence = TypeError(
        f"{name} or its arguments cannot be sent to another process: {error}. A function must be one that its module"
        " has under its name, not a lambda or a local one; open files, locks and CUDA tensors stay where they are."
    )
    sentence.__cause__ = error
    return sentence


@atexit.register
def _end_all() -> None:
    """End what still runs when the program ends."""
    loops = list(_loops)
    for tasks in loops:
        tasks.end()
    for tasks in loops:
        tasks.join(GRACE_S * 3)
