"""Jupyter kernel provisioner: each kernel runs on GPUs of its own, leased before it starts.

A kernelspec names it in its `kernel.json`; docs/tools/jupyter.md shows how. Its CUDA_VISIBLE_DEVICES names the GPUs.

- The Jupyter server owns the lease, so that it outlives a restart of the kernel, which finds the same GPUs.
- A kernel that is shut down gives its GPUs back. So does one that dies, unless it is restarted within
  `RESTARTED_WITHIN_S`, as Jupyter does by itself.
- If the lease is lost, the kernel is killed: others may use its GPUs.
- A refusal reaches the notebook: it is a tornado HTTPError, and Jupyter shows its message.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import LocalProvisioner
from tornado.web import HTTPError
from traitlets import Int, Unicode

from gpulease.client import Client
from gpulease.executor.executor import local_node
from gpulease.lease import HeldLease
from gpulease_protocol.durations import parse_duration
from gpulease_protocol.errors import GpuleaseError, NotFound
from gpulease_protocol.launchers import lease_variables, strip_launcher_variables

TTL_S = 60.0
RESTARTED_WITHIN_S = 3.5
"""How long the GPUs of a kernel that died are kept for its restart. Jupyter looks for dead kernels every 3 s."""


class KernelRefused(HTTPError):
    """The kernel has no GPUs, and so it is not started. The message says why."""

    def __str__(self) -> str:
        return str(self.log_message)


class GpuleaseProvisioner(LocalProvisioner):
    """Starts kernels on leased GPUs of this host. Its settings stand in kernel.json, or in a Jupyter configuration."""

    gpus = Int(1, min=1, help="How many GPUs a kernel has.", config=True)
    gpu_wait = Unicode("", help="How long to wait for them: 30s, 5m. By default GPULEASE_WAIT_S, or 0.", config=True)
    gpu_model = Unicode("", help="A part of the GPUs' product name.", config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._lease: HeldLease | None = None
        self._changing = threading.Lock()
        self._starts = 0

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Lease GPUs, unless the lease of this kernel is still held; bind the kernel to them."""
        bound = await self._lease_env(kwargs.get("env", os.environ))
        try:
            kwargs = await super().pre_launch(**kwargs)
        except BaseException:
            await asyncio.to_thread(self._release)
            raise
        kwargs["env"] = strip_launcher_variables(kwargs["env"]) | bound
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Start the kernel, and watch it."""
        try:
            info = await super().launch_kernel(cmd, **kwargs)
        except BaseException:
            await asyncio.to_thread(self._release)
            raise
        self._starts += 1
        watching = (os.pidfd_open(self.process.pid), self._starts)
        threading.Thread(target=self._watch, args=watching, name="gpulease-kernel", daemon=True).start()
        return info

    async def cleanup(self, restart: bool = False) -> None:
        """Give the GPUs back, except before a restart."""
        await super().cleanup(restart)
        if not restart:
            await asyncio.to_thread(self._release)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Also the id of the lease, for those who show it."""
        return {**await super().get_provisioner_info(), "lease_id": self._lease.id if self._lease else None}

    async def _lease_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that bind the kernel to its GPUs."""
        with self._changing:
            self._starts += 1  # the thread that watches the former process leaves the lease alone
            if self._lease is not None and self._lease.active:
                return self._lease.env
        asking = asyncio.get_running_loop().run_in_executor(None, partial(self._acquire, environ))
        try:
            self._lease = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_release_unused)
            raise
        return self._lease.env if self._lease is not None else lease_variables(os.environ)

    def _acquire(self, environ: Mapping[str, str]) -> HeldLease | None:
        """A lease; None if the server runs under one, which the kernel then uses. Raises KernelRefused."""
        notebook = Path(environ.get("JPY_SESSION_NAME", "")).name
        try:
            client = Client()
            if _inside_a_lease(client):
                return None
            return client.lease(
                count=self.gpus,
                wait_s=parse_duration(self.gpu_wait or os.environ.get("GPULEASE_WAIT_S") or "0"),
                ttl_s=TTL_S,
                label=f"jupyter {notebook}".strip(),
                gpu_model=self.gpu_model or None,
                node=local_node(client)[0],
                on_lost=self._on_lost,
            )
        except (GpuleaseError, ValueError) as error:
            raise KernelRefused(503, f"gpulease: {error}", reason="No GPUs") from error

    def _watch(self, pidfd: int, start: int) -> None:
        """Give the GPUs back when the kernel has died and is not started again."""
        try:
            ended = select.poll()  # not select.select, which fails in a server with many files
            ended.register(pidfd, select.POLLIN)
            ended.poll()
        finally:
            os.close(pidfd)
        threading.Event().wait(RESTARTED_WITHIN_S)
        self._release(start)

    def _release(self, start: int | None = None) -> None:
        """Give the GPUs back; with `start`, only if the kernel was not started again since."""
        with self._changing:
            if start not in (None, self._starts):
                return
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__(None, None, None)

    def _on_lost(self, lease: HeldLease) -> None:
        process = self.process
        if process is not None:
            self.log.error("Kernel %s is killed, because its lease %s is lost.", self.kernel_id, lease.id)
            process.kill()


def _inside_a_lease(client: Client) -> bool:
    lease_id = os.environ.get("GPULEASE_LEASE_ID")
    try:
        return bool(lease_id) and client.lease_by_id(str(lease_id)).state == "active"
    except NotFound:
        return False


def _release_unused(asking: asyncio.Future[HeldLease | None]) -> None:
    """Give back what was granted after the start of the kernel was given up."""
    if not asking.cancelled() and asking.exception() is None and (lease := asking.result()) is not None:
        lease.__exit__(None, None, None)
