"""CUDA_VISIBLE_DEVICES with CUDA's own indices, for programs that do not read UUIDs. docs/ordinals.md says when.

UUIDs are the default: a wrong UUID shows no GPU and fails at once, while a wrong index is another user's GPU and goes
unnoticed. So an index is never derived from a list of GPUs. NVML counts GPUs that are lost or in MIG mode, and CUDA
does not; a container or a device cgroup hides some; an MPS control daemon renumbers them. Instead CUDA is queried
twice, in the environment of the program: which devices it shows without a mask, and whether the mask that follows from
that shows exactly the GPUs of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpulease.cuda import libcuda
from gpulease.cuda.ordinals import MASK, ORDER, PCI_ORDER
from gpulease_protocol.errors import UnknownOrdinals
from gpulease_protocol.model import Device

QUERY_TIMEOUT_S = 60.0
"""Time limit for one query. On a host without persistence mode cuInit takes seconds for each GPU; the program itself
would wait as long."""
FAILED = "The numbers that CUDA gives these GPUs are not known"
USE_UUIDS = 'See what CUDA reports on this host, or use environ(mask="uuids") if the program reads UUIDs.'


def mask_variables(indices: Sequence[int]) -> dict[str, str]:
    """The variables with which CUDA shows these devices, by index, in this order."""
    return {MASK: ",".join(map(str, indices)), ORDER: PCI_ORDER}


def cuda_indices(
    uuids: Sequence[str], environ: Mapping[str, str], query: Callable[[Mapping[str, str]], list[str]]
) -> list[int]:
    """CUDA's indices of these GPUs in this environment, without a mask and in PCI order.

    `query` returns the devices that CUDA shows in an environment, as `libcuda.query_devices`. Raises CudaError if the
    query fails, if CUDA does not show all of them, or if it shows other GPUs under the resulting mask.
    """
    unmasked = {name: value for name, value in environ.items() if name != MASK} | {ORDER: PCI_ORDER}
    shown = query(unmasked)
    missing = [uuid for uuid in uuids if uuid not in shown]
    if missing:
        raise libcuda.CudaError(f"it does not show {', '.join(missing)}, but {', '.join(shown) or 'no GPU at all'}")
    indices = [shown.index(uuid) for uuid in uuids]
    masked = query({**environ, **mask_variables(indices)})
    if masked != list(uuids):
        mask = mask_variables(indices)[MASK]
        raise libcuda.CudaError(
            f"under {MASK}={mask} it shows {', '.join(masked) or 'no GPU at all'} instead of {', '.join(uuids)}"
        )
    return indices


def with_index_mask(environ: Mapping[str, str], gpus: Sequence[Device], *, simulated: bool) -> dict[str, str]:
    """A copy of an environment that is bound to these GPUs, with an index mask.

    Starts two processes that initialize CUDA, one after the other, which takes a second or two. `simulated` GPUs are
    unknown to CUDA; they keep their indices in the daemon's list. Raises UnknownOrdinals.
    """
    if simulated:
        return {**environ, **mask_variables([gpu.index for gpu in gpus])}
    try:
        return {**environ, **mask_variables(cuda_indices([gpu.uuid for gpu in gpus], environ, _query))}
    except libcuda.CudaError as error:
        raise UnknownOrdinals(f"{FAILED}: CUDA was asked on this host, and {error}.", remedy=USE_UUIDS) from error


def _query(environ: Mapping[str, str]) -> list[str]:
    return libcuda.query_devices(environ, QUERY_TIMEOUT_S)
