"""CUDA_VISIBLE_DEVICES by CUDA's own numbers, for programs that read nothing else. docs/ordinals.md says when.

UUIDs are the default: one that is wrong shows no GPU and fails at once, while a number that is wrong is somebody else's
GPU, and nobody notices. So a number is never counted from a list of GPUs. NVML counts GPUs that are lost or split, and
CUDA does not; a container or a cgroup of devices hides some; an MPS control daemon renumbers them. CUDA itself is
asked, in the environment in which the program will run, and twice: which devices it shows without a mask, and whether
the mask that follows from that shows exactly the GPUs of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpulease import cuda
from gpulease.errors import UnknownOrdinals
from gpulease.model import Device
from gpulease.ordinals import MASK, ORDER, PCI_ORDER

ASK_S = 60.0
"""How long one answer of CUDA's may take: on a host that keeps no driver state (persistence mode), cuInit takes seconds
for each GPU. The program would wait as long."""
FAILED = "The numbers that CUDA gives these GPUs are not known"
BY_UUID = 'Look at what CUDA says there, or take environ(mask="uuids") if the program reads UUIDs.'


def variables(numbers: Sequence[int]) -> dict[str, str]:
    """What has CUDA show these devices, by number, in this order."""
    return {MASK: ",".join(map(str, numbers)), ORDER: PCI_ORDER}


def numbers(
    uuids: Sequence[str], environ: Mapping[str, str], ask: Callable[[Mapping[str, str]], list[str]]
) -> list[int]:
    """The numbers that CUDA gives these GPUs in this environment, without a mask and in PCI order.

    `ask` says which devices CUDA shows under an environment, as `cuda.ask` does. Raises CudaFailed when it cannot be
    asked, does not show them all, or shows others under the mask that is made of them.
    """
    unmasked = {name: value for name, value in environ.items() if name != MASK} | {ORDER: PCI_ORDER}
    shown = ask(unmasked)
    missing = [uuid for uuid in uuids if uuid not in shown]
    if missing:
        raise cuda.CudaFailed(f"it does not show {', '.join(missing)}, but {', '.join(shown) or 'no GPU at all'}")
    found = [shown.index(uuid) for uuid in uuids]
    masked = ask({**environ, **variables(found)})
    if masked != list(uuids):
        mask = variables(found)[MASK]
        raise cuda.CudaFailed(
            f"under {MASK}={mask} it shows {', '.join(masked) or 'no GPU at all'} instead of {', '.join(uuids)}"
        )
    return found


def by_index(environ: Mapping[str, str], gpus: Sequence[Device], *, simulated: bool) -> dict[str, str]:
    """A copy of an environment that is bound to these GPUs, with a mask of numbers.

    Starts two processes that initialise CUDA, one after the other: a second or two. Of `simulated` GPUs CUDA knows
    nothing; their places in the daemon's list are as good as any label. Raises UnknownOrdinals.
    """
    if simulated:
        return {**environ, **variables([gpu.index for gpu in gpus])}
    try:
        return {**environ, **variables(numbers([gpu.uuid for gpu in gpus], environ, _ask))}
    except cuda.CudaFailed as error:
        raise UnknownOrdinals(f"{FAILED}: CUDA was asked on this host, and {error}.", remedy=BY_UUID) from error


def _ask(environ: Mapping[str, str]) -> list[str]:
    return cuda.ask(environ, ASK_S)
