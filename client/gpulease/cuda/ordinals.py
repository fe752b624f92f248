"""CUDA ordinals: which GPUs CUDA shows this process, and under which numbers. docs/ordinals.md explains it to users.

There are three sources. The first that applies is used:

1. CUDA is initialized in this process: CUDA itself. It read mask and order in cuInit, whatever they are now.
2. It is not, and its behavior is documented: the mask, applied to the GPUs that this process may open, in PCI order.
   CUDA uses that order only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which `VisibleDevices.fix_ordinals` sets if it is unset.
3. It is not, and its behavior is ambiguous (`_ambiguity`): CUDA in a process of its own, with the same environment.

CUDA's devices are matched with the daemon's GPUs by UUID, never by position. If no source is certain, UnknownOrdinals
is raised before anything is leased: a wrong number is another user's GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gpulease.cuda import libcuda
from gpulease_protocol.errors import MaskLatched, UnknownOrdinals
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Gpu

MASK = "CUDA_VISIBLE_DEVICES"
"""Which GPUs CUDA shows, and in which order."""
ORDER = "CUDA_DEVICE_ORDER"
"""How CUDA numbers GPUs: by PCI_BUS_ID, or by default with the GPU that it takes for the fastest first."""
PCI_ORDER = "PCI_BUS_ID"
HEALTHY = {"ok", "processes_unknown", "row_remap_pending", "row_remap_failed"}
"""Health of GPUs that CUDA is sure to count. Older workers report `row_remap_pending` as health, not as a warning."""
USE_UUIDS = f"Name healthy GPUs in {MASK} by full UUID, as `nvidia-smi -L` prints them; nothing was reserved."
USE_PCI_ORDER = f"Set {ORDER}={PCI_ORDER}, or unset it, before CUDA is used; nothing was reserved."


MAX_DIGITS = 10
"""No GPU has an index of as many digits."""

MaskSettings: TypeAlias = "tuple[str | None, str | None]"


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices that CUDA shows this process."""

    devices: tuple[Gpu | None, ...]
    """By ordinal. None is a device that the daemon does not lease: a MIG slice, or one unknown to it."""
    host: tuple[Gpu, ...]
    """Every GPU of this host, in PCI order."""
    initialized: bool
    """True if CUDA is initialized, so that the ordinals can no longer change."""
    simulated: bool = False
    """True if the GPUs have no device files."""

    @property
    def gpus(self) -> list[Gpu]:
        """The devices that can be leased."""
        return [gpu for gpu in self.devices if gpu is not None]

    def ordinals(self, uuids: Iterable[str]) -> list[int]:
        """Ordinals of these GPUs, ascending. Raises UnknownOrdinals if CUDA does not show all of them."""
        requested = set(uuids)
        ordinals = [ordinal for ordinal, gpu in enumerate(self.devices) if gpu is not None and gpu.uuid in requested]
        if len(ordinals) != len(requested):
            raise UnknownOrdinals(
                f"CUDA does not show this process all of {', '.join(sorted(requested))}.",
                remedy=f"Initialize CUDA before or after asking for GPUs, not meanwhile, and do not change {MASK}.",
            )
        return ordinals

    def fix_ordinals(self, uuids: Iterable[str]) -> list[int]:
        """Ordinals of these leased GPUs that will not change: sets PCI order if no order is set.

        CUDA's default would number the fastest GPU first. Once CUDA is initialized, the order is left alone, so that
        child processes number as it does. If another thread has initialized it meanwhile, CUDA is asked. Raises
        UnknownOrdinals; release the GPUs then.
        """
        if self.initialized:
            return self.ordinals(uuids)
        shown = _initialized_devices()
        if shown is not None:
            return _leasable(shown, self.host, initialized=True).ordinals(uuids)
        ordinals = self.ordinals(uuids)
        os.environ[ORDER] = os.environ.get(ORDER) or PCI_ORDER
        return ordinals


def visible_gpus(
    gpus: Sequence[Gpu],
    environ: Mapping[str, str] = os.environ,
    *,
    simulated: bool = False,
    root: Path = Path("/"),
) -> VisibleDevices:
    """What CUDA shows this process of this host's GPUs, which are given in PCI order. `root` is the file system's.

    `simulated` GPUs have no device files. Costs a look at /proc/self/maps; if the environment is ambiguous, also
    `libcuda.query_devices`, about a second. Raises UnknownOrdinals if the ordinals cannot be known.
    """
    shown = _initialized_devices()
    if shown is not None:
        return _leasable(shown, gpus, initialized=True)
    mask = environ.get(MASK)
    _refuse_slices(mask)
    files = {} if simulated else device_files(root)
    present = accessible_gpus(gpus, files)
    uuids = [gpu.uuid for gpu in present]
    masked = [uuids[position] for position in masked_positions(mask, uuids)]
    ambiguity = _ambiguity(present, mask, environ.get(ORDER))
    if ambiguity is None and not simulated:
        ambiguity = _host_ambiguity(present, files, mask, mps_pipe_directory(environ, root))
    if ambiguity is None or (mask is not None and re.match("-1|$", mask)):
        return _leasable(masked, gpus, initialized=False, simulated=simulated)
    reason, remedy = ambiguity
    try:
        devices = libcuda.query_devices({**environ, ORDER: environ.get(ORDER) or PCI_ORDER})
    except libcuda.CudaNotInstalled as error:
        # Without device files nothing uses CUDA here and the numbers are labels; even so, no order is guessed.
        if files or remedy == USE_PCI_ORDER:
            raise UnknownOrdinals(f"{reason} CUDA cannot be asked: {error}.", remedy=remedy) from error
        devices = masked
    except libcuda.CudaError as error:
        raise UnknownOrdinals(f"{reason} CUDA was asked, and {error}.", remedy=remedy) from error
    return _leasable(devices, gpus, initialized=False, simulated=simulated)


def mask_settings() -> MaskSettings:
    """Mask and order as CUDA would read them now."""
    return os.environ.get(MASK), os.environ.get(ORDER)


def initialized_since(visible: VisibleDevices) -> bool:
    """True if CUDA has been initialized in this process since `visible` was made."""
    return not visible.initialized and _initialized_devices() is not None


def check_mask_changeable() -> None:
    """Raise MaskLatched if it is too late for `set_mask`, UnknownOrdinals if that is not known. Call before leasing."""
    if _initialized_devices() is not None:
        raise MaskLatched(
            f"CUDA is initialized in this process, so it is too late to change {MASK}.",
            remedy="Ask for GPUs before using CUDA, or without set_visible; nothing was reserved.",
        )


def set_mask(uuids: Sequence[str]) -> None:
    """Have CUDA show only these GPUs, in this order, here and in child processes: their ordinals are 0, 1, 2 and so on.

    Raises MaskLatched if CUDA has been initialized meanwhile; release the GPUs then.
    """
    check_mask_changeable()
    os.environ[MASK] = ",".join(uuids)
    os.environ[ORDER] = PCI_ORDER


def masked_positions(mask: str | None, uuids: Sequence[str]) -> list[int]:
    """Positions in `uuids` (all GPUs, in PCI order) of the devices that CUDA shows under `mask`, in the mask's order.

    The rules are NVIDIA's; where NVIDIA states none (`_is_undocumented`), those of torch 2.13's
    `_parse_visible_devices` and `_transform_uuid_to_ordinals`: an entry that does not name exactly one GPU cuts off the
    rest, and a GPU named twice leaves no device at all.
    """
    if mask is None:
        return list(range(len(uuids)))
    positions: list[int] = []
    by_uuid = mask.startswith("GPU-")
    for entry in mask.split(","):
        matches = _by_prefix(entry, uuids) if by_uuid else _by_index(entry, len(uuids))
        if len(matches) != 1:
            break
        if matches[0] in positions:
            return []
        positions += matches
    return positions


def device_files(root: Path = Path("/")) -> Mapping[int, bool]:
    """Minor numbers of the device files `/dev/nvidiaN`, and whether this process may open each.

    Opening them would wake the GPU; access(2) respects device cgroups just as open(2) does.
    """
    files = {}
    for path in (root / "dev").glob("nvidia[0-9]*"):
        number = path.name.removeprefix("nvidia")
        if number.isdecimal():
            files[int(number)] = os.access(path, os.R_OK | os.W_OK)
    return files


def mps_pipe_directory(environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """Pipe directory of the MPS control daemon that CUDA in this process will use; None without one.

    Source: the MPS documentation, on CUDA_MPS_PIPE_DIRECTORY and CUDA_VISIBLE_DEVICES.
    """
    pipes = root / (environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").lstrip("/")  # noqa: S108 - MPS's own
    return pipes if (pipes / "control").exists() else None


def accessible_gpus(gpus: Sequence[Gpu], files: Mapping[int, bool]) -> list[Gpu]:
    """The GPUs that CUDA counts: those with a device file that this process may open.

    A container or a device cgroup (Slurm) hides some of the host's. A GPU is assumed to be accessible if there are no
    device files (WSL has none), or if the driver did not report its minor number.
    """
    if not files:
        return list(gpus)
    return [gpu for gpu in gpus if gpu.minor_number is None or files.get(gpu.minor_number)]


def _initialized_devices() -> list[str] | None:
    try:
        return libcuda.initialized_devices()
    except libcuda.CudaError as error:
        raise UnknownOrdinals(
            f"CUDA is loaded in this process, and which GPUs its numbers mean is not known: {error}.",
            remedy="Ask for GPUs before using CUDA; nothing was reserved.",
        ) from error


def _leasable(
    uuids: Sequence[str], gpus: Sequence[Gpu], *, initialized: bool, simulated: bool = False
) -> VisibleDevices:
    """The daemon's GPUs with these UUIDs, by ordinal. CUDA does not show a GPU in MIG mode under its UUID."""
    by_uuid = {gpu.uuid: None if _in_mig_mode(gpu) else gpu for gpu in gpus}
    visible = VisibleDevices(tuple(by_uuid.get(uuid) for uuid in uuids), tuple(gpus), initialized, simulated)
    if uuids and not visible.gpus:
        raise UnknownOrdinals(
            f"CUDA shows this process {', '.join(uuids)}, and the daemon leases none of these: they are MIG slices, or"
            " GPUs of another node.",
            remedy="Ask the daemon of this machine, for whole GPUs; nothing was reserved.",
        )
    return visible


def _in_mig_mode(gpu: Gpu) -> bool:
    return bool(gpu.mig) or gpu.health == "mig"


def _refuse_slices(mask: str | None) -> None:
    slice_uuid = next((entry for entry in (mask or "").split(",") if entry.strip().upper().startswith("MIG-")), None)
    if slice_uuid is not None:
        raise UnknownOrdinals(
            f"{MASK} names the MIG slice {slice_uuid.strip()!r}, and gpulease leases whole GPUs.",
            remedy="Name whole GPUs, or use the slice without gpulease; nothing was reserved.",
        )


def _ambiguity(gpus: Sequence[Gpu], mask: str | None, order: str | None) -> tuple[str, str] | None:
    """Why only CUDA can say which of these GPUs it will show, and a remedy; None if it is clear."""
    # Among GPUs of one model, fastest first is the PCI order; a mask of UUIDs sets its own order.
    alike = len(gpus) < 2 or len({gpu.name or gpu.uuid for gpu in gpus}) == 1
    if order and order != PCI_ORDER and not alike and not (mask or "").startswith("GPU-"):
        models = ", ".join(sorted({gpu.name or "name unknown" for gpu in gpus}))
        return (
            f"{ORDER} is {order!r}, and with GPUs of several models ({models}) CUDA's numbers may then mean other GPUs"
            " than those reserved.",
            USE_PCI_ORDER,
        )
    if _is_undocumented(mask, [gpu.uuid for gpu in gpus]):
        return f"{MASK} is {mask!r}, and how CUDA reads that is not documented.", USE_UUIDS
    counted = [gpus[position] for position in masked_positions(mask, [gpu.uuid for gpu in gpus])]
    for gpu in counted if (mask or "").startswith("GPU-") else gpus:
        if gpu.health not in HEALTHY or _in_mig_mode(gpu):
            return f"GPU {gpu.index} is {gpu.health!r}, and CUDA may not count it.", USE_UUIDS
    return None


def _host_ambiguity(
    gpus: Sequence[Gpu], files: Mapping[int, bool], mask: str | None, mps: Path | None
) -> tuple[str, str] | None:
    """The same for what the host has and the daemon did not report."""
    if mask and {gpu.uuid for gpu in gpus}.issuperset(mask.split(",")):
        return None  # full UUIDs are never ambiguous
    unknown = {number for number, allowed in files.items() if allowed} - {gpu.minor_number for gpu in gpus}
    if unknown:
        return f"/dev/nvidia{min(unknown)} belongs to no GPU that the daemon knows, and CUDA may count it.", USE_UUIDS
    if mps is not None:
        return f"There is an MPS control daemon ({mps}), which may number GPUs by its own mask.", USE_UUIDS
    return None


def _is_undocumented(mask: str | None, uuids: Sequence[str]) -> bool:
    """True if NVIDIA does not document how CUDA reads this mask.

    Two forms are documented: indices, where the first invalid one (such as -1) cuts off the rest; and UUIDs, or
    prefixes of UUIDs that name one GPU each. Source: CUDA programming guide 13.4, section 5.2.1.1.
    """
    if not mask:
        return False
    entries = mask.split(",")
    if all(re.fullmatch("-1|0|[1-9][0-9]*", entry) for entry in entries):
        valid = [entry for entry in entries if _number(entry) < len(uuids)]
        return len(valid) != len(set(valid))
    matches = [_by_prefix(entry, uuids) for entry in entries]
    return any(len(match) != 1 for match in matches) or len({match[0] for match in matches}) != len(entries)


def _by_prefix(entry: str, uuids: Sequence[str]) -> list[int]:
    if not entry.startswith("GPU-"):
        return []
    return [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]


def _by_index(entry: str, count: int) -> list[int]:
    # Like strtoul, CUDA reads the leading digits of an entry: "1gpu" is 1.
    digits = re.match(r"\+?[0-9]+", entry.strip())
    return [_number(digits[0])] if digits and _number(digits[0]) < count else []


def _number(digits: str) -> int:
    """A whole number. Python reads no more than some thousand digits."""
    return int(digits[-MAX_DIGITS:]) if len(digits.lstrip("+0")) < MAX_DIGITS else sys.maxsize
