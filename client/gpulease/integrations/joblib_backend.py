"""joblib backend: each call of a `joblib.Parallel` runs in a process of its own, on GPUs leased for it.

    from gpulease.integrations import joblib_backend

    joblib_backend.register()
    with joblib.parallel_config(backend="gpulease", n_jobs=4):
        losses = joblib.Parallel()(joblib.delayed(train)(lr) for lr in rates)

It runs on `GPUExecutor`: a lease lasts as long as its call, so more jobs than GPUs wait for each other in the daemon's
queue, and none holds a GPU without working.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from joblib import register_parallel_backend
from joblib.parallel import ParallelBackendBase

from gpulease.client import Client
from gpulease.executor.executor import GPUExecutor, local_node

NAME = "gpulease"


def register(make_default: bool = False) -> None:
    """Make the backend known to joblib as "gpulease"; with `make_default`, use it wherever no other is named."""
    register_parallel_backend(NAME, GpuleaseBackend, make_default=make_default)


class GpuleaseBackend(ParallelBackendBase):
    """Runs each call through a `GPUExecutor`.

    `parallel_config(backend="gpulease", ...)` takes `gpus_per_task`, `wait_s` and `label`, as `GPUExecutor` does.
    `n_jobs` is how many calls wait for GPUs or run at a time; -1, the default, is as many as this node has GPUs for.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1
    uses_threads = False
    supports_sharedmem = False

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        gpus_per_task: int = 1,
        wait_s: float | None = None,
        label: str = "joblib",
    ) -> None:
        super().__init__(nesting_level, inner_max_num_threads)
        self._gpus_per_task = gpus_per_task
        self._wait_s = wait_s
        self._label = label
        self._executor: GPUExecutor | None = None
        self._workers = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """A call takes its backend along into its process, where that has nothing to run."""
        return type(self), (self.nesting_level,)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many calls joblib hands over at a time: at least 2, because with 1 it runs them itself, without GPUs."""
        return max(2, self._calls_at_a_time(n_jobs))

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Start the executor."""
        self.parallel = parallel
        self._workers = self._calls_at_a_time(n_jobs)
        self._executor = GPUExecutor(
            self._workers, self._gpus_per_task, wait_s=self._wait_s, label=self._label, by_value=True
        )
        return max(2, self._workers)

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], None] | None = None) -> Future[Any]:
        """Run a call when its GPUs are granted."""
        if self._executor is None:
            raise RuntimeError("The backend is used by joblib.Parallel, not by hand.")
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The result of a call, or its error."""
        return out.result()

    def terminate(self) -> None:
        """Wait for the running calls, at the end of a Parallel."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End the running calls, because one has failed."""
        if self._executor is not None:
            self._executor.terminate_workers()
            self._executor = None
        if ensure_ready:
            self.configure(self._workers, self.parallel)

    def _calls_at_a_time(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is not None and n_jobs > 0:
            return n_jobs
        with Client() as client:
            _, gpus = local_node(client)
        most = max(1, gpus // max(1, self._gpus_per_task))
        return most if n_jobs is None else max(1, most + 1 + n_jobs)
