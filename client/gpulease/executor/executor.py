"""`GPUExecutor`: a `concurrent.futures.Executor` that runs each task on leased GPUs, in a process of its own.

Each task has its own lease and its own process. A process that has used CUDA stays bound to its GPUs, and other users
in the daemon's queue must get their turn, so neither process nor lease outlives its task. The price is one start of
Python for each task (0.1 s, and the task's imports), which is little compared with a training.

- The process is new (`spawn`). Its environment has the lease's variables (`CUDA_VISIBLE_DEVICES` and others) before it
  imports anything of the caller. Function, arguments and result are pickled; the arguments when `submit` is called.
- A task waits in the daemon's queue like any other request, at most `max_workers` tasks at a time. Cancelling its
  future withdraws the request. A running task cannot be cancelled.
- A task fails alone. Its exception has the remote traceback as its cause; if the process dies, only its own future
  raises `ProcessDied`. If the lease is lost, the process is ended and the future raises `LeaseLost`.
- The GPUs are released after the process has exited and before the future has its result.
- Ctrl-C in the block, or while the block waits at its end, ends the running tasks. So does the exit of the program:
  without `shutdown`, nothing is left to read the results. If this process is killed, the kernel kills those of the
  tasks.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing import spawn
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from gpulease.client import Client
from gpulease.device_request import surrounding_lease
from gpulease.executor.task_child import NotPicklable
from gpulease.executor.task_loop import Task, TaskLoop
from gpulease.executor.task_process import GRACE_S, ProcessDied, TaskTraceback
from gpulease.own_node import none_here, own_node
from gpulease_protocol.errors import InUse, InvalidRequest

__all__ = ["GPUExecutor", "NotPicklable", "ProcessDied", "TaskTraceback"]

P = ParamSpec("P")
T = TypeVar("T")

MAX_WORKERS = 1024
"""Most tasks of one executor that wait in the daemon's queue or run at a time."""

TTL_S = 60.0
"""How soon the GPUs are free again if this process dies unseen by the daemon."""

_loops: weakref.WeakSet[TaskLoop] = weakref.WeakSet()


class GPUExecutor(Executor):
    """Runs each task in a process of its own, bound to its own GPUs.

        with gpulease.GPUExecutor(gpus_per_task=2) as executor:
            losses = list(executor.map(train, learning_rates))

    `max_workers`: how many tasks at a time; by default as many as this node has GPUs for. `wait_s`: how long each task
    waits in the queue before its future raises NotNow; None waits forever. `label` is shown to others who wait.
    `progress` draws a bar on stderr (requires rich). `mp_context` exists for compatibility with ProcessPoolExecutor,
    and can only be "spawn". With `by_value` function, arguments and result are sent with cloudpickle: functions of
    notebooks and lambdas too. A task then does not import the caller's main module, which needs no
    `if __name__ == "__main__"`.

    Raises DaemonUnavailable if no daemon responds, InvalidRequest for invalid arguments, InUse if the lease that this
    process was started under leaves a task too few GPUs, ImportError for `progress` without rich or `by_value` without
    cloudpickle.
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
        by_value: bool = False,
    ) -> None:
        _check(max_workers, gpus_per_task, mp_context)
        self._dumps = _by_value() if by_value else pickle.dumps
        bar = _progress_bar(label) if progress else None
        lease_client = client or Client()
        try:
            node, gpus = local_node(lease_client, gpus_per_task)
        finally:
            if client is None:
                lease_client.close()
        lease_arguments = {
            "count": gpus_per_task,
            "ttl_s": TTL_S,
            "wait_s": math.inf if wait_s is None else wait_s,
            "label": label,
            "node": node,
        }
        self._bar = bar
        self._by_value = by_value
        self._tasks = TaskLoop(
            lease_client.destination,
            max_workers or max(1, gpus // gpus_per_task),
            lease_arguments,
            bar or _no_progress,
        )
        _loops.add(self._tasks)
        # An executor that is garbage collected finishes its tasks.
        weakref.finalize(self, self._tasks.close).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of `fn(*args, **kwargs)`, which raises NotPicklable if these cannot be pickled.

            future = executor.submit(train, learning_rate=0.1)
            loss = future.result()

        Raises RuntimeError after `shutdown`, and if a main module submits while a task imports it.
        """
        name = getattr(fn, "__qualname__", None) or repr(fn)
        preparation = spawn.get_preparation_data(name)
        preparation["authkey"] = bytes(preparation["authkey"])
        if self._by_value:
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        try:
            content = self._dumps((fn, args, kwargs))
        except Exception as error:
            failed: Future[T] = Future()
            failed.set_exception(_pickling_error(name, error))
            return failed
        task = Task(pickle.dumps((preparation, content, self._by_value)), name)
        self._tasks.submit(task)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks; Ctrl-C ends the running ones.

        `wait` until all tasks are done; `cancel_futures` of tasks that do not run yet.
        """
        try:
            self._tasks.close(cancel_futures)
            if not wait:
                return
            self._tasks.join()
        except BaseException:
            self.terminate_workers()
            raise
        self._close_bar()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self.terminate_workers()
        else:
            self.shutdown()

    def terminate_workers(self) -> None:
        """End the running tasks, withdraw the requests of the others, and accept no more."""
        self._tasks.abort()
        self._tasks.join(GRACE_S * 3)
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _no_progress(total: int, done: int) -> None:
    """Progress is not shown."""


class _ProgressBar:
    """A progress bar on stderr, drawn by rich."""

    def __init__(self, progress: Any, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label or "tasks", total=0)
        progress.start()

    def __call__(self, total: int, done: int) -> None:
        self._progress.update(self._task, total=total, completed=done)

    def close(self) -> None:
        self._progress.stop()


def _progress_bar(label: str) -> _ProgressBar:
    try:
        from rich.console import Console  # noqa: PLC0415 - only a progress bar needs rich
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("progress=True needs rich. Install it with: pip install rich") from error
    console = Console(stderr=True)
    return _ProgressBar(
        Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), console=console), label
    )


def _by_value() -> Callable[[object], bytes]:
    try:
        from cloudpickle import dumps  # noqa: PLC0415 - only where it is asked for
    except ImportError as error:
        raise ImportError("by_value=True needs cloudpickle. Install it with: pip install cloudpickle") from error
    return cast("Callable[[object], bytes]", dumps)


def _check(max_workers: int | None, gpus_per_task: int, mp_context: str | BaseContext | None) -> None:
    if max_workers is not None and not (isinstance(max_workers, int) and 1 <= max_workers <= MAX_WORKERS):
        raise InvalidRequest(f"max_workers must be greater than 0 and at most {MAX_WORKERS}, not {max_workers!r}.")
    if isinstance(gpus_per_task, bool) or not isinstance(gpus_per_task, int) or gpus_per_task < 1:
        raise InvalidRequest(f"gpus_per_task: must be a whole number over 0, not {gpus_per_task!r}.")
    method = mp_context.get_start_method() if isinstance(mp_context, BaseContext) else mp_context
    if method not in (None, "spawn"):
        raise InvalidRequest(
            f"mp_context: with {method!r} tasks would inherit the parent's CUDA state.", remedy='Use "spawn", or none.'
        )


def local_node(client: Client, gpus_per_task: int = 0) -> tuple[str | None, int]:
    """Name of this host's node and its number of GPUs; None and 0 if the daemon knows no node yet.

    Raises NeverFits if it has nodes of other hosts only, InUse if a task would wait for the end of this process.
    """
    gpus = client.gpus()
    nodes = [node for node in client.nodes() if node.name in {gpu.node for gpu in gpus}]
    own = own_node(nodes)
    if own is None and nodes:
        raise none_here(nodes)
    if own is None:
        return None, 0
    here = [gpu for gpu in gpus if gpu.node == own.name]
    around = surrounding_lease(client)
    others = {gpu.uuid for gpu in here} - {gpu.uuid for gpu in (around.gpus if around else ())}
    if around is not None and len(others) < gpus_per_task <= len(here):
        raise InUse(
            f"This process runs under lease {around.id}, which has {len(here) - len(others)} of the {len(here)} GPUs of"
            f" {own.name} until it ends, and a task with {gpus_per_task} of its own would wait for that.",
            remedy="Start it without a lease: each task takes its own.",
        )
    return own.name, len(here)


def _pickling_error(name: str, error: Exception) -> NotPicklable:
    failure = NotPicklable(
        f"{name} or its arguments cannot be sent to another process: {error}. The function must be defined at the top"
        " level of a module, not a lambda or a nested one; open files, locks and CUDA tensors cannot be sent."
    )
    failure.__cause__ = error
    return failure


def _forget() -> None:
    for tasks in list(_loops):
        tasks.forked()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _abort_all() -> None:
    """End the running tasks when the program exits."""
    loops = list(_loops)
    for tasks in loops:
        tasks.abort()
    for tasks in loops:
        tasks.join(GRACE_S * 3)
