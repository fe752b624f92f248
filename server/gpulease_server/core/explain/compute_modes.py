"""What a compute mode means for who gets the GPU."""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.model import ComputeMode
from gpulease_server.core.gpu import reading_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import GpuRecord


def mode_notes(ledger: Ledger, gpus: Iterable[GpuRecord]) -> str:
    """A sentence for the GPUs that admit one process at a time, to follow others; empty when every mode is the default.

    A GPU in mode PROHIBITED is an obstacle and not a note: see `core.explain.explain`.
    """
    exclusive = []
    for gpu in gpus:
        reading = reading_of(ledger, gpu)
        if reading is not None and reading.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
            exclusive.append(gpu.device)
    if not exclusive:
        return ""
    names = ", ".join(f"GPU {device.index} of {device.node}" for device in exclusive[:16])
    are = "is" if len(exclusive) == 1 else "are"
    return (
        f" {names} {are} in compute mode EXCLUSIVE_PROCESS: one process on each at a time; a second one gets the CUDA"
        ' error "all CUDA-capable devices are busy or unavailable".'
    )
