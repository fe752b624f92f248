"""dask worker plugin: tasks that are annotated with the executor "gpulease" run on GPUs leased for them.

    from gpulease.integrations.dask_plugin import GpuleasePlugin

    client.register_plugin(GpuleasePlugin(gpus_per_task=1))
    with dask.annotate(executor="gpulease"):
        losses = client.gather(client.map(train, rates))

Each such task runs in a process of its own, a child of its dask worker, and holds its lease for as long as it runs.
All other tasks run in the worker as before. A worker that is idle holds nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import WorkerPlugin

from gpulease.executor.executor import GPUExecutor

NAME = "gpulease"


class GpuleasePlugin(WorkerPlugin):
    """Adds the executor "gpulease" to each worker, those to come included.

    A worker runs as many tasks at a time as it has threads (`nthreads`), whether these wait for GPUs or have them.
    `gpus_per_task`, `wait_s` and `label` are those of `GPUExecutor`. Where no daemon answers a worker, registering the
    plugin raises DaemonUnavailable.
    """

    name = NAME

    def __init__(self, gpus_per_task: int = 1, *, wait_s: float | None = None, label: str = "dask") -> None:
        self.gpus_per_task = gpus_per_task
        self.wait_s = wait_s
        self.label = label

    async def setup(self, worker: Any) -> None:
        """Give a worker its executor."""
        worker.executors[NAME] = await asyncio.to_thread(
            WorkerExecutor, worker.state.nthreads, self.gpus_per_task, wait_s=self.wait_s, label=self.label,
            by_value=True,
        )  # fmt: skip

    async def teardown(self, worker: Any) -> None:
        """End what still runs, when the worker closes or the plugin is unregistered."""
        executor = worker.executors.pop(NAME, None)
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)


class WorkerExecutor(GPUExecutor):
    """A `GPUExecutor` that ends with its worker. No one reads the results of a worker that has closed."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the running tasks, and withdraw the requests of the others."""
        self.terminate_workers()
