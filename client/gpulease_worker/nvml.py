"""The one module that talks to NVML, through `nvidia-ml-py`: what the driver says, as plain values.

Every question is answered with a value, with None where the driver cannot or may not tell (never 0 for that), or with
one of two errors: `GpuFailed` concerns one GPU, `LibraryFailed` all of them. Which calls exist depends on the driver;
where a newer one is missing an older one is asked.

Source: nvml.h 13.3 and nvidia-ml-py 13.615; for the process lists of driver 535.43 also nvitop's `libnvml.py`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from gpulease.model import ComputeMode, ProcessType
from gpulease.wire import spell_uuid
from gpulease_worker import driver, health
from gpulease_worker.nvml_words import ANCESTORS, FABRIC_FAILED, FABRIC_STATES, RECOVERY_ACTIONS, THROTTLE_REASONS

LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST: health.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: health.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: health.RESET_REQUIRED,
}
"""Errors that concern one GPU, and its health then."""
LIBRARY_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
"""Errors that concern every GPU. All the others mean: this value is not to be had."""
ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}
"""Errors that say that a GPU or its driver has no such thing; after any other it may have one that cannot be read."""
COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
    # Exclusive-thread went away with CUDA 8; a driver that still says so admits one process at most.
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: ComputeMode.EXCLUSIVE_PROCESS,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
}
NVML_MODES = {
    ComputeMode.DEFAULT: pynvml.NVML_COMPUTEMODE_DEFAULT,
    ComputeMode.PROHIBITED: pynvml.NVML_COMPUTEMODE_PROHIBITED,
    ComputeMode.EXCLUSIVE_PROCESS: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
}
FABRIC_CALLS = (
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
    ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
)
"""The newest first, each with what it fills in. Its third version adds only a summary of the links' health."""
PROCESS_LISTS = (
    (ProcessType.COMPUTE, "nvmlDeviceGetComputeRunningProcesses"),
    (ProcessType.MPS, "nvmlDeviceGetMPSComputeRunningProcesses"),
    (ProcessType.GRAPHICS, "nvmlDeviceGetGraphicsRunningProcesses"),
)
"""Where processes are listed; a process in several counts as the first."""
CAPS_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py spells as a tuple by mistake."""
UNTOLD = {2**32 - 1, 2**64 - 1}
ECC_COUNTERS = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
LIBRARY = "libnvidia-ml.so"
SHADOWED = "is the deprecated package pynvml, not nvidia-ml-py. Uninstall it and reinstall nvidia-ml-py."


class GpuFailed(Exception):
    """One GPU does not answer. `health` says what it is then."""

    def __init__(self, health_word: str, text: str) -> None:
        super().__init__(text)
        self.health = health_word


class LibraryFailed(Exception):
    """NVML itself does not answer. `mismatch` when library and kernel module are of different versions."""

    def __init__(self, text: str, *, mismatch: bool = False) -> None:
        super().__init__(text)
        self.mismatch = mismatch


class Refused(Exception):
    """The driver cannot or may not do or tell one thing. The text is its reason, `code` NVML's word for it; None where
    the driver, or the binding, does not even know the question."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code

    @property
    def absent(self) -> bool:
        """There is no such thing, as far as the driver tells."""
        return self.code is None or self.code in ABSENT


class NoProcessList(Exception):
    """A GPU's driver has no list of compute processes at all, as under WSL2: it neither refuses one nor fails."""


class ProcessV1(ctypes.Structure):
    """`nvmlProcessInfo_v1_t`, of drivers that have only the unversioned process lists."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Listed:
    """A process as the driver lists it."""

    pid: int
    """Process id."""
    type: ProcessType
    """The list that it is on."""
    memory_bytes: int | None
    """GPU memory it holds; None under MIG and wherever else the driver cannot tell."""


class Nvml:
    """One session with the driver's library. Not for several threads, but for `wait_for_xid`."""

    def __init__(self) -> None:
        self.under_way: tuple[str, float] | None = None
        """The call that has not come back yet, and since when on the monotonic clock."""
        self._lists: dict[str, str | None] = {}

    def open(self) -> None:
        """Begin. Raises LibraryFailed."""
        if Path(pynvml.__file__).name != "pynvml.py":
            raise LibraryFailed(f"{pynvml.__file__} {SHADOWED}")
        self._grave("nvmlInit")
        self._lists = {name: _newest(name) for _, name in PROCESS_LISTS}

    def close(self) -> None:
        """End the session; the driver then no longer counts this process as a client."""
        self.under_way = ("nvmlShutdown", time.monotonic())
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # it is closed already, or it went away with the driver
        finally:
            self.under_way = None

    def driver_version(self) -> str | None:
        """Version of the driver that this library speaks to."""
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """How many GPUs there may be; the handle of one may still fail. Raises LibraryFailed."""
        return int(self._grave("nvmlDeviceGetCount"))

    def handle(self, position: int) -> Any:
        """The handle of a GPU. Raises GpuFailed."""
        handle = self.ask("nvmlDeviceGetHandleByIndex", position)
        if handle is None:
            raise GpuFailed(health.UNREADABLE, f"the driver gives no handle of GPU {position}")
        return handle

    def uuid(self, handle: Any) -> str:
        """Raises GpuFailed when it is not to be had, because then nothing can be said of the GPU."""
        found = _text(self.ask("nvmlDeviceGetUUID", handle))
        if not found:
            raise GpuFailed(health.UNREADABLE, "the driver tells no UUID")
        return spell_uuid(found)

    def bus_id(self, handle: Any) -> str | None:
        """PCI bus id in the spelling of `Device.pci_bus_id`."""
        found = self.ask("nvmlDeviceGetPciInfo", handle)
        return None if found is None else spell_bus_id(_text(found.busId) or "")

    def name(self, handle: Any) -> str | None:
        """Product name."""
        return _text(self.ask("nvmlDeviceGetName", handle))

    def number(self, call: str, handle: Any) -> int | None:
        """The answer of a call that answers with one whole number."""
        return _told(self.ask(call, handle))

    def memory(self, handle: Any) -> tuple[int, int] | None:
        """Total and used bytes, without what the driver reserves; with it where the driver is too old to tell."""
        found = self.ask("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2)
        found = found or self.ask("nvmlDeviceGetMemoryInfo", handle)
        total, used = (None, None) if found is None else (_told(found.total), _told(found.used))
        return None if total is None or used is None else (total, used)

    def activity(self, handle: Any) -> dict[str, Any]:
        """Members of a `GpuReading` that change from second to second."""
        memory = self.memory(handle)
        busy = self.ask("nvmlDeviceGetUtilizationRates", handle)
        celsius = _told(self.ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU))
        if celsius is None:  # the call above goes away with CUDA 14
            celsius = _told(self.ask("nvmlDeviceGetTemperatureV", handle, pynvml.NVML_TEMPERATURE_GPU))
        milliwatts = _told(self.ask("nvmlDeviceGetPowerUsage", handle))
        return {
            "memory_used_bytes": None if memory is None else memory[1],
            "utilization_ratio": None if busy is None else min(1.0, busy.gpu / 100),
            "temperature_c": None if celsius is None else float(celsius),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "compute_mode": self.compute_mode(handle),
        }

    def processes(self, handle: Any) -> list[Listed] | None:
        """Every process on the GPU, once each; None when a list cannot be read: that is not an empty one.

        Raises NoProcessList where there is none.
        """
        found: dict[int, Listed] = {}
        for kind, name in PROCESS_LISTS:
            try:
                listed = self._whole_list(name, handle)
            except Refused as refused:
                # WSL2 has been seen to refuse lists that it has not in either way.
                wsl = refused.code == pynvml.NVML_ERROR_UNKNOWN and driver.WSL.exists()
                # Where there is no MPS and no graphics, nobody can use them; a GPU always computes.
                if kind is ProcessType.COMPUTE and (wsl or refused.code == pynvml.NVML_ERROR_NOT_SUPPORTED):
                    raise NoProcessList from refused
                if kind is ProcessType.COMPUTE or not (wsl or refused.absent):
                    return None
                continue
            for pid, used in listed:
                found.setdefault(pid, Listed(pid, kind, used))
        return list(found.values())

    def facts(self, handle: Any) -> tuple[health.Facts, int | None]:
        """What decides health, but for processes and Xids; and how many rows were remapped."""
        mig = self.ask("nvmlDeviceGetMigMode", handle)
        rows = self.ask("nvmlDeviceGetRemappedRows", handle)
        # What has rows to replace retires no pages.
        pages = self.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle) if rows is None else None
        told = health.Facts(
            recovery_action=self._recovery_action(handle),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            pages_pending=None if pages is None else pages == pynvml.NVML_FEATURE_ENABLED,
            fabric=self._fabric(handle),
            mig=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        )
        return told, None if rows is None else int(rows[0]) + int(rows[1])

    def condition(self, handle: Any) -> dict[str, Any]:
        """Members of a `GpuReading` that tell how the GPU fares, and decide nothing."""
        corrected, uncorrected = (
            _told(self.ask("nvmlDeviceGetTotalEccErrors", handle, kind, pynvml.NVML_VOLATILE_ECC))
            for kind in ECC_COUNTERS
        )
        mask = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        mask = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if mask is None else mask
        return {
            "ecc_corrected": corrected,
            "ecc_uncorrected": uncorrected,
            "throttle_reasons": None if mask is None else tuple(w for bit, w in THROTTLE_REASONS.items() if mask & bit),
        }

    def handle_at(self, pci_bus_id: str) -> Any:
        """The handle of a GPU by its PCI bus id, which works while another GPU is lost. Raises GpuFailed, Refused."""
        return self.call("nvmlDeviceGetHandleByPciBusId", pci_bus_id.encode())

    def compute_mode(self, handle: Any) -> ComputeMode | None:
        """A GPU's compute mode now; None where the driver does not tell."""
        return COMPUTE_MODES.get(self.ask("nvmlDeviceGetComputeMode", handle))

    def set_compute_mode(self, handle: Any, mode: ComputeMode) -> None:
        """For contexts that are made from now on. Raises Refused: it needs root, and no MIG."""
        self.call("nvmlDeviceSetComputeMode", handle, NVML_MODES[mode])

    def path(self, first: Any, second: Any) -> tuple[str | None, bool | None]:
        """How two GPUs are connected, in the words of `GpuLink.path`, and whether each reads the other's memory."""
        wired = self.ask("nvmlDeviceGetP2PStatus", first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        read = self.ask("nvmlDeviceGetP2PStatus", first, second, CAPS_READ)
        peer = None if read is None else read == pynvml.NVML_P2P_STATUS_OK
        if wired == pynvml.NVML_P2P_STATUS_OK:
            return "nvlink", peer
        return ANCESTORS.get(self.ask("nvmlDeviceGetTopologyCommonAncestor", first, second)), peer

    def register_xids(self, handles: Sequence[Any]) -> Any:
        """An event set that tells of the Xids of these GPUs; None where the driver has none."""
        events = self.ask("nvmlEventSetCreate")
        for handle in handles if events is not None else ():
            with suppress(GpuFailed):  # its readings say what ails it
                self.ask("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
        return events

    def wait_for_xid(self, events: Any, timeout_s: float) -> tuple[str, int] | None:
        """UUID and Xid of the next error; None when there was none in time. For a thread of its own.

        Raises GpuFailed or LibraryFailed when waiting makes no sense any more.
        """
        try:
            event = pynvml.nvmlEventSetWait_v2(events, int(timeout_s * 1000))
            return spell_uuid(_text(pynvml.nvmlDeviceGetUUID(event.device)) or ""), int(event.eventData)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise LibraryFailed(str(error)) from error

    def forget_xids(self, events: Any) -> None:
        """Give an event set back."""
        self.ask("nvmlEventSetFree", events)

    def ask(self, call: str, *words: Any, **named: Any) -> Any:
        """The answer of one call; None where it cannot be had. Raises GpuFailed and LibraryFailed."""
        try:
            return self.call(call, *words, **named)
        except Refused:
            return None

    def call(self, call: str, *words: Any, **named: Any) -> Any:
        """The answer of one call. Raises Refused, GpuFailed and LibraryFailed."""
        function = getattr(pynvml, call, None)
        if function is None:
            raise Refused(f"nvidia-ml-py does not know {call}")
        self.under_way = (call, time.monotonic())
        try:
            return function(*words, **named)
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_GONE:
                mismatch = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
                raise LibraryFailed(str(error), mismatch=mismatch) from error
            if error.value in LOST:
                raise GpuFailed(LOST[error.value], str(error)) from error
            raise Refused(str(error), error.value) from error
        except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError: it misses a function of the library
            raise Refused(str(error)) from error
        except UnicodeDecodeError as error:  # a GPU in trouble may tell a name that is none
            raise Refused(f"{call} answers with what is no text: {error}") from error
        finally:
            self.under_way = None

    def _grave(self, call: str) -> Any:
        """The answer of a call without which nothing goes."""
        self.under_way = (call, time.monotonic())
        try:
            return getattr(pynvml, call)()
        except pynvml.NVMLError as error:
            mismatch = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
            raise LibraryFailed(str(error), mismatch=mismatch) from error
        except pynvml.NVMLLibraryMismatchError as error:
            raise LibraryFailed(f"nvidia-ml-py does not fit this driver's library: {error}") from error
        finally:
            self.under_way = None

    def _whole_list(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """As `_list`; tried once more where processes came meanwhile."""
        try:
            return self._list(name, handle)
        except Refused as refused:
            if refused.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise
            return self._list(name, handle)

    def _list(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """Pid and memory of each process on one list. Raises Refused and GpuFailed."""
        version = self._lists[name]
        if version is None:
            raise Refused(f"the driver has no {name}")
        if version == "":
            return self._list_v1(name, handle)
        return [(int(one.pid), _told(one.usedGpuMemory)) for one in self.call(name + version, handle)]

    def _list_v1(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """A list by its oldest call, which nvidia-ml-py no longer offers. As there: one call for the size, one more."""
        self.under_way = (name, time.monotonic())
        try:
            call, count = pynvml._nvmlGetFunctionPointer(name), ctypes.c_uint(0)
            if call(handle, ctypes.byref(count), None) == pynvml.NVML_SUCCESS:
                return []
            count.value = count.value * 2 + 5
            entries = (ProcessV1 * count.value)()
            answer = call(handle, ctypes.byref(count), entries)
        finally:
            self.under_way = None
        if answer in LOST:
            raise GpuFailed(LOST[answer], name)
        if answer != pynvml.NVML_SUCCESS:
            raise Refused(f"{name} fails with {answer}", answer)
        return [(int(one.pid), _told(one.usedGpuMemory)) for one in entries[: count.value]]

    def _fabric(self, handle: Any) -> str | None:
        """How far a GPU is with its NVLink fabric; None where it is on none, or the driver does not tell."""
        for call, struct in FABRIC_CALLS:
            info = getattr(pynvml, struct)()
            if self.ask(call, handle, ctypes.byref(info)) is None:
                continue
            number = int(info.state)
            if number == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status != pynvml.NVML_SUCCESS:
                return FABRIC_FAILED
            return FABRIC_STATES.get(number, f"state_{number}") if number else None
        return None

    def _recovery_action(self, handle: Any) -> str | None:
        found = self.ask("nvmlDeviceGetFieldValues", handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if found is None or found[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        number = int(found[0].value.uiVal)
        return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else f"action_{number}"


def _newest(name: str) -> str | None:
    """The newest version of a process list that library and nvidia-ml-py both read alike; None when there is none.

    Drivers 535.43 to 535.86 list processes under `_v3` in a longer struct, which nvidia-ml-py would read as garbage.
    They are the ones that know confidential computing but not `nvmlDeviceGetRunningProcessDetailList`.
    """
    longer = _has("nvmlDeviceGetConfComputeMemSizeInfo") and not _has("nvmlDeviceGetRunningProcessDetailList")
    for version in ("_v3", "_v2"):
        if _has(name + version) and hasattr(pynvml, name + version) and not (longer and version == "_v3"):
            return version
    return "" if _has(name) else None


def _has(symbol: str) -> bool:
    try:
        pynvml._nvmlGetFunctionPointer(symbol)
    except pynvml.NVMLError:
        return False
    return True


def _told(number: int | None) -> int | None:
    """A number as the driver tells it; None for its word for unknown, all bits set, which no amount of anything is."""
    return None if number is None or number in UNTOLD else int(number)


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def spell_bus_id(text: str) -> str:
    """A PCI bus id with the 8-digit domain and upper-case hex, whichever way the driver spells it."""
    domain, colon, rest = text.upper().partition(":")
    return f"{domain.zfill(8)}{colon}{rest}"
