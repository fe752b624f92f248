"""gpulease: GPU leases on shared machines.

    import gpulease

    indices = gpulease.find_usable_cuda_devices(2)      # reserved until this process ends, or gpulease.release()

    with gpulease.usable_cuda_devices(1) as indices:    # reserved until the end of the block
        ...

    client = gpulease.Client()
    with client.lease(count=2, wait_s=600) as lease:
        subprocess.run(command, env=lease.environ())

Every name is loaded when it is first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulease.async_client import AsyncClient
    from gpulease.async_lease import AsyncLease
    from gpulease.client import Client, find_usable_cuda_devices
    from gpulease.device_block import DeviceBlock, free_cuda_devices, on_gpus, usable_cuda_devices
    from gpulease.executor.executor import GPUExecutor
    from gpulease.executor.task_process import ProcessDied
    from gpulease.find_devices import release, reserved_leases
    from gpulease.lease import HeldLease
    from gpulease_protocol.errors import (
        DaemonUnavailable,
        EventsPruned,
        GpuleaseError,
        IdempotencyMismatch,
        InUse,
        InvalidRequest,
        LeaseLost,
        MaskLatched,
        MethodNotAllowed,
        NeverFits,
        NotAllowed,
        NotAuthenticated,
        NotFound,
        NotNow,
        OverQuota,
        StaleToken,
        TooLarge,
        TooSlow,
        Unavailable,
        UnknownOrdinals,
    )
    from gpulease_protocol.explanation import Explanation, Obstacle
    from gpulease_protocol.model import (
        Activity,
        ComputeMode,
        Demand,
        Device,
        EndReason,
        Event,
        Gpu,
        GpuLink,
        GpuState,
        Holder,
        Job,
        JobAttempt,
        JobDependency,
        JobState,
        Launcher,
        Lease,
        LeaseState,
        Liveness,
        Mask,
        Node,
        NodeState,
        Process,
    )
    from gpulease_protocol.requests import JobRequest, LeaseRequest

__all__ = [
    "Activity",
    "AsyncClient",
    "AsyncLease",
    "Client",
    "ComputeMode",
    "DaemonUnavailable",
    "Demand",
    "Device",
    "DeviceBlock",
    "EndReason",
    "Event",
    "EventsPruned",
    "Explanation",
    "GPUExecutor",
    "Gpu",
    "GpuLink",
    "GpuState",
    "GpuleaseError",
    "HeldLease",
    "Holder",
    "IdempotencyMismatch",
    "InUse",
    "InvalidRequest",
    "Job",
    "JobAttempt",
    "JobDependency",
    "JobRequest",
    "JobState",
    "Launcher",
    "Lease",
    "LeaseLost",
    "LeaseRequest",
    "LeaseState",
    "Liveness",
    "Mask",
    "MaskLatched",
    "MethodNotAllowed",
    "NeverFits",
    "Node",
    "NodeState",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "NotNow",
    "Obstacle",
    "OverQuota",
    "Process",
    "ProcessDied",
    "StaleToken",
    "TooLarge",
    "TooSlow",
    "Unavailable",
    "UnknownOrdinals",
    "find_usable_cuda_devices",
    "free_cuda_devices",
    "on_gpus",
    "release",
    "reserved_leases",
    "usable_cuda_devices",
]

_HOME = {
    "AsyncClient": "gpulease.async_client",
    "AsyncLease": "gpulease.async_lease",
    "Client": "gpulease.client",
    "DeviceBlock": "gpulease.device_block",
    "Explanation": "gpulease_protocol.explanation",
    "GPUExecutor": "gpulease.executor.executor",
    "HeldLease": "gpulease.lease",
    "Obstacle": "gpulease_protocol.explanation",
    "ProcessDied": "gpulease.executor.task_process",
    "find_usable_cuda_devices": "gpulease.client",
    "free_cuda_devices": "gpulease.device_block",
    "on_gpus": "gpulease.device_block",
    "release": "gpulease.find_devices",
    "reserved_leases": "gpulease.find_devices",
    "usable_cuda_devices": "gpulease.device_block",
}
_MODULES = ("gpulease_protocol.errors", "gpulease_protocol.model", "gpulease_protocol.requests")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (_HOME[name],) if name in _HOME else _MODULES:
            value = getattr(import_module(module), name, None)
            if value is not None:
                globals()[name] = value
                return value
    raise AttributeError(f"module 'gpulease' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
