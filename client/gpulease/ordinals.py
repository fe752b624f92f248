"""Which GPUs CUDA shows this process, and under which numbers: CUDA ordinals. docs/ordinals.md is the same for users.

Three authorities, the first that applies:

1. CUDA is initialised in this process: CUDA itself. It read mask and order in cuInit, whatever they say by now.
2. It is not, and what it will do is documented: the mask, over the GPUs that this process may open, in PCI order. CUDA
   counts so only under CUDA_DEVICE_ORDER=PCI_BUS_ID, which `Visible.settle` sets where it is not set.
3. It is not, and what it will do is in doubt (`_doubt`): CUDA in a process of its own, started with this environment.

Devices are the daemon's GPUs by UUID, never by position, wherever CUDA was asked. Where none of the three can tell,
UnknownOrdinals is raised before anything is leased: a wrong number is someone else's GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gpulease import cuda
from gpulease.errors import MaskLatched, UnknownOrdinals
from gpulease.model import Gpu

MASK = "CUDA_VISIBLE_DEVICES"
"""Which GPUs CUDA shows, and in which order."""
ORDER = "CUDA_DEVICE_ORDER"
"""How CUDA counts this machine's GPUs: PCI_BUS_ID, or by default with the one it takes for the fastest first."""
PCI_ORDER = "PCI_BUS_ID"
SOUND = {"ok", "processes_unknown", "row_remap_pending", "row_remap_failed"}
"""Health of GPUs that CUDA certainly counts. `row_remap_pending` is what older workers say in place of a warning."""
BY_UUID = f"Name sound GPUs in {MASK} by their full UUIDs, as `nvidia-smi -L` prints them; nothing was reserved."
BY_ORDER = f"Set {ORDER}={PCI_ORDER}, or unset it, before CUDA is used; nothing was reserved."


Settings: TypeAlias = "tuple[str | None, str | None]"


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices that CUDA shows this process."""

    devices: tuple[Gpu | None, ...]
    """By ordinal. None is a device that the daemon does not lease: a MIG slice, or one of which it does not know."""
    host: tuple[Gpu, ...]
    """Every GPU of this host, in PCI order."""
    latched: bool
    """True when CUDA is initialised, so that nothing can change the ordinals any more."""
    simulated: bool = False
    """True where the GPUs have no device files."""

    @property
    def gpus(self) -> list[Gpu]:
        """Those that can be leased."""
        return [gpu for gpu in self.devices if gpu is not None]

    def ordinals(self, uuids: Iterable[str]) -> list[int]:
        """Ordinals of these GPUs, ascending. Raises UnknownOrdinals if CUDA does not show them all."""
        wanted = set(uuids)
        found = [ordinal for ordinal, gpu in enumerate(self.devices) if gpu is not None and gpu.uuid in wanted]
        if len(found) != len(wanted):
            raise UnknownOrdinals(
                f"CUDA does not show this process all of {', '.join(sorted(wanted))}.",
                remedy=f"Initialise CUDA before GPUs are asked for or after, not meanwhile; leave {MASK} alone.",
            )
        return found

    def settle(self, uuids: Iterable[str]) -> list[int]:
        """Ordinals of these GPUs, now leased, for good: has CUDA count in PCI order where no order is set.

        Its own default would count the fastest GPU first. Once it is initialised no order is set any more, so that
        programs started from here count as it does; and if another thread has initialised it since, its own numbers
        count. Raises UnknownOrdinals; give the GPUs back.
        """
        if self.latched:
            return self.ordinals(uuids)
        shown = _shown()
        if shown is not None:
            return _known(shown, self.host, latched=True).ordinals(uuids)
        found = self.ordinals(uuids)
        os.environ[ORDER] = os.environ.get(ORDER) or PCI_ORDER
        return found


def visible_gpus(
    gpus: Sequence[Gpu],
    environ: Mapping[str, str] = os.environ,
    *,
    simulated: bool = False,
    root: Path = Path("/"),
) -> Visible:
    """What CUDA shows this process of this host's GPUs, given in PCI order. `root` is the file system's.

    GPUs that are `simulated` have no device files. Costs a look at what this process has loaded; where the environment
    leaves a doubt, the second that `cuda.ask` takes. Raises UnknownOrdinals when it cannot be told.
    """
    shown = _shown()
    if shown is not None:
        return _known(shown, gpus, latched=True)
    mask = environ.get(MASK)
    _refuse_slices(mask)
    files = {} if simulated else device_files(root)
    present = openable(gpus, files)
    uuids = [gpu.uuid for gpu in present]
    read = [uuids[position] for position in visible_devices(mask, uuids)]
    doubt = _doubt(present, mask, environ.get(ORDER))
    if doubt is None and not simulated:
        doubt = _doubt_of_machine(present, files, mask, mps_files(environ, root))
    if doubt is None or (mask is not None and re.match("-1|$", mask)):
        return _known(read, gpus, latched=False, simulated=simulated)
    why, remedy = doubt
    try:
        asked = cuda.ask({**environ, ORDER: environ.get(ORDER) or PCI_ORDER})
    except cuda.NoCuda as error:
        # Without device files nothing uses CUDA here, and its numbers are labels. An order is not guessed even so.
        if files or remedy == BY_ORDER:
            raise UnknownOrdinals(f"{why} CUDA cannot be asked: {error}.", remedy=remedy) from error
        asked = read
    except cuda.CudaFailed as error:
        raise UnknownOrdinals(f"{why} CUDA was asked, and {error}.", remedy=remedy) from error
    return _known(asked, gpus, latched=False, simulated=simulated)


def settings() -> Settings:
    """Mask and order as CUDA would read them now."""
    return os.environ.get(MASK), os.environ.get(ORDER)


def started_since(visible: Visible) -> bool:
    """True if CUDA was initialised in this process after `visible` was made."""
    return not visible.latched and _shown() is not None


def check_narrow() -> None:
    """Raise MaskLatched if `narrow` would come too late, UnknownOrdinals if that cannot be told. Before leasing."""
    if _shown() is not None:
        raise MaskLatched(
            f"CUDA is initialised in this process, so {MASK} cannot be narrowed any more.",
            remedy="Ask for GPUs before CUDA is used, or without set_visible; nothing was reserved.",
        )


def narrow(uuids: Sequence[str]) -> None:
    """Have CUDA show these GPUs and no others, in this order: their ordinals are 0, 1, 2 and so on.

    Also in programs started from here. Raises MaskLatched if CUDA was initialised meanwhile; give the GPUs back.
    """
    check_narrow()
    os.environ[MASK] = ",".join(uuids)
    os.environ[ORDER] = PCI_ORDER


def visible_devices(mask: str | None, uuids: Sequence[str]) -> list[int]:
    """Positions in `uuids` (every GPU, in PCI order) of what CUDA shows under `mask`, in the order of the mask.

    The rules are NVIDIA's, and where it states none (`_odd`), those of torch 2.13's `_parse_visible_devices` and
    `_transform_uuid_to_ordinals`: an entry that does not name exactly one GPU cuts off the rest; a GPU named twice
    leaves nothing at all.
    """
    if mask is None:
        return list(range(len(uuids)))
    found: list[int] = []
    by_uuid = mask.startswith("GPU-")
    for entry in mask.split(","):
        matches = _by_prefix(entry, uuids) if by_uuid else _by_index(entry, len(uuids))
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found += matches
    return found


def device_files(root: Path = Path("/")) -> Mapping[int, bool]:
    """Minor numbers of the device files `/dev/nvidiaN`, and whether this process may open each.

    They are not opened, which would wake the GPU; access(2) heeds cgroups of devices as open(2) does.
    """
    found = {}
    for path in (root / "dev").glob("nvidia[0-9]*"):
        number = path.name.removeprefix("nvidia")
        if number.isdecimal():
            found[int(number)] = os.access(path, os.R_OK | os.W_OK)
    return found


def mps_files(environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """Where the MPS control daemon, whose client CUDA in this process will be, has its pipes; None without one.

    Source: its documentation, on CUDA_MPS_PIPE_DIRECTORY and CUDA_VISIBLE_DEVICES.
    """
    pipes = root / (environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").lstrip("/")  # noqa: S108 - MPS's own
    return pipes if (pipes / "control").exists() else None


def openable(gpus: Sequence[Gpu], files: Mapping[int, bool]) -> list[Gpu]:
    """Those whose device file this process may open; CUDA counts no others.

    In a container, or under a cgroup of devices (Slurm), that is not all of the host. Without any file nothing is known
    (WSL has none), and of a GPU whose minor number the driver did not tell neither.
    """
    if not files:
        return list(gpus)
    return [gpu for gpu in gpus if gpu.minor_number is None or files.get(gpu.minor_number)]


def _shown() -> list[str] | None:
    try:
        return cuda.devices_shown()
    except cuda.CudaFailed as error:
        raise UnknownOrdinals(
            f"CUDA is loaded in this process, and it cannot be told which GPUs its numbers mean: {error}.",
            remedy="Ask for GPUs before CUDA is used; nothing was reserved.",
        ) from error


def _known(uuids: Sequence[str], gpus: Sequence[Gpu], *, latched: bool, simulated: bool = False) -> Visible:
    """The daemon's GPUs of these UUIDs, by ordinal. A GPU that is split is not what CUDA shows under its UUID."""
    by_uuid = {gpu.uuid: None if _split(gpu) else gpu for gpu in gpus}
    visible = Visible(tuple(by_uuid.get(uuid) for uuid in uuids), tuple(gpus), latched, simulated)
    if uuids and not visible.gpus:
        raise UnknownOrdinals(
            f"CUDA shows this process {', '.join(uuids)}, and the daemon leases none of these: they are MIG slices, or"
            " GPUs of another node.",
            remedy="Ask the daemon of this machine, for whole GPUs; nothing was reserved.",
        )
    return visible


def _split(gpu: Gpu) -> bool:
    return bool(gpu.mig) or gpu.health == "mig"


def _refuse_slices(mask: str | None) -> None:
    named = next((entry for entry in (mask or "").split(",") if entry.strip().upper().startswith("MIG-")), None)
    if named is not None:
        raise UnknownOrdinals(
            f"{MASK} names the MIG slice {named.strip()!r}, and gpulease leases whole GPUs.",
            remedy="Name whole GPUs, or use the slice without asking for it; nothing was reserved.",
        )


def _doubt(gpus: Sequence[Gpu], mask: str | None, order: str | None) -> tuple[str, str] | None:
    """Why only CUDA can say what it will show of these GPUs, and what would put an end to it; None if it is clear."""
    # Among GPUs of one kind the fastest first is the PCI order; a mask of UUIDs brings an order of its own.
    alike = len(gpus) < 2 or len({gpu.name or gpu.uuid for gpu in gpus}) == 1
    if order and order != PCI_ORDER and not alike and not (mask or "").startswith("GPU-"):
        kinds = ", ".join(sorted({gpu.name or "name unknown" for gpu in gpus}))
        return (
            f"{ORDER} is {order!r}, and with GPUs of several kinds ({kinds}) CUDA's numbers may then be those of other"
            " GPUs than were reserved.",
            BY_ORDER,
        )
    if _odd(mask, [gpu.uuid for gpu in gpus]):
        return f"{MASK} is {mask!r}, and what CUDA makes of that is not documented.", BY_UUID
    counted = [gpus[position] for position in visible_devices(mask, [gpu.uuid for gpu in gpus])]
    for gpu in counted if (mask or "").startswith("GPU-") else gpus:
        if gpu.health not in SOUND or _split(gpu):
            return f"GPU {gpu.index} is {gpu.health!r}, and CUDA may not count it.", BY_UUID
    return None


def _doubt_of_machine(
    gpus: Sequence[Gpu], files: Mapping[int, bool], mask: str | None, mps: Path | None
) -> tuple[str, str] | None:
    """The same, for what the machine has that the daemon did not tell."""
    if mask and {gpu.uuid for gpu in gpus}.issuperset(mask.split(",")):
        return None  # whole UUIDs mean the same whatever else there is
    strange = {number for number, allowed in files.items() if allowed} - {gpu.minor_number for gpu in gpus}
    if strange:
        return f"/dev/nvidia{min(strange)} belongs to no GPU that the daemon knows, and CUDA may count it.", BY_UUID
    if mps is not None:
        return f"There is an MPS control daemon ({mps}), which may number GPUs by a mask of its own.", BY_UUID
    return None


def _odd(mask: str | None, uuids: Sequence[str]) -> bool:
    """True for a mask of which NVIDIA does not document how CUDA reads it.

    Documented are indices, of which the first that is invalid (such as -1) cuts off the rest, and UUIDs or their
    beginnings that name one GPU each. Source: CUDA programming guide 13.4, section 5.2.1.1.
    """
    if not mask:
        return False
    entries = mask.split(",")
    if all(re.fullmatch("-1|0|[1-9][0-9]*", entry) for entry in entries):
        valid = [entry for entry in entries if int(entry) < len(uuids)]
        return len(valid) != len(set(valid))
    matches = [_by_prefix(entry, uuids) for entry in entries]
    return any(len(match) != 1 for match in matches) or len({match[0] for match in matches}) != len(entries)


def _by_prefix(entry: str, uuids: Sequence[str]) -> list[int]:
    if not entry.startswith("GPU-"):
        return []
    return [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]


def _by_index(entry: str, count: int) -> list[int]:
    # Like strtoul, CUDA reads the digits that an entry begins with: "1gpu" is 1.
    digits = re.match(r"\+?[0-9]+", entry.strip())
    return [int(digits[0])] if digits and int(digits[0]) < count else []
