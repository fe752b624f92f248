"""CPython's own tests of executors (`Lib/test/test_concurrent_futures.py`), on `GPUExecutor`.

Run with `python -m unittest executor_suite`, with the directory of that file on PYTHONPATH.
"""

from __future__ import annotations

import multiprocessing

import test_concurrent_futures as cpython

from gpulease import GPUExecutor


class GPUExecutorMixin(cpython.ExecutorMixin):
    """What CPython's mixins for its own executors do."""

    executor_type = GPUExecutor
    ctx = "spawn"

    def get_context(self) -> multiprocessing.context.BaseContext:
        """The context that the tests hand to the executor."""
        return multiprocessing.get_context(self.ctx)


class ExecutorTest(GPUExecutorMixin, cpython.ExecutorTest, cpython.BaseTestCase):
    """Submit and map."""


class WaitTests(GPUExecutorMixin, cpython.WaitTests, cpython.BaseTestCase):
    """`concurrent.futures.wait`."""


class AsCompletedTests(GPUExecutorMixin, cpython.AsCompletedTests, cpython.BaseTestCase):
    """`concurrent.futures.as_completed`."""


class ShutdownTest(GPUExecutorMixin, cpython.ExecutorShutdownTest, cpython.BaseTestCase):
    """Shutdown and cancelling."""

    # They import the executor from `concurrent.futures`.
    test_interpreter_shutdown = None
    test_submit_after_interpreter_shutdown = None
    test_hang_gh83386 = None
    # It shuts down at once, and expects that some tasks run by then. Ours still wait for GPUs, and are cancelled.
    test_cancel_futures = None


class DeadlockTest(GPUExecutorMixin, cpython.ExecutorDeadlockTest, cpython.BaseTestCase):
    """Tasks and results that crash, at every stage."""

    # They expect that the whole pool breaks. Ours raises the task's own error, from its future alone.
    test_error_at_task_unpickle = None
    test_exit_at_task_unpickle = None
    test_error_during_result_unpickle_in_result_handler = None
    test_exit_during_result_unpickle_in_result_handler = None
    # It looks into `ProcessPoolExecutor`.
    test_shutdown_deadlock_pickle = None
