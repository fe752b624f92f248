"""Wraps NVML (`nvidia-ml-py`), the only module that does: returns what the driver reports as plain values.

Every query returns a value, or None if the driver cannot or may not tell (never 0 for that), or raises one of two
errors: `GpuFailed` concerns one GPU, `LibraryFailed` all of them. Which calls exist depends on the driver; if a newer
one is missing, an older one is used.

Source: nvml.h 13.3 and nvidia-ml-py 13.615; for the process lists of driver 535.43 also nvitop's `libnvml.py`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ComputeMode, ProcessType
from gpulease_worker.probe import driver_check, gpu_health
from gpulease_worker.probe.nvml_constants import (
    FABRIC_FAILED,
    FABRIC_STATES,
    RECOVERY_ACTIONS,
    THROTTLE_REASONS,
    TOPOLOGY_PATHS,
)

HEALTH_BY_ERROR = {
    pynvml.NVML_ERROR_GPU_IS_LOST: gpu_health.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: gpu_health.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: gpu_health.RESET_REQUIRED,
}
"""The health of a GPU by the error that concerns it."""
LIBRARY_ERRORS = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
"""Errors that concern every GPU. Any other error means that this value is not available."""
UNSUPPORTED_ERRORS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}
"""Errors that mean that the GPU or its driver lacks the feature; after other errors it may exist."""
COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
    # Exclusive-thread was removed with CUDA 8; a driver that still reports it admits at most one process.
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
"""Newest first, each with the struct that it fills. The third version adds only a summary of link health."""
PROCESS_LISTS = (
    (ProcessType.COMPUTE, "nvmlDeviceGetComputeRunningProcesses"),
    (ProcessType.MPS, "nvmlDeviceGetMPSComputeRunningProcesses"),
    (ProcessType.GRAPHICS, "nvmlDeviceGetGraphicsRunningProcesses"),
)
"""The lists of processes; a process on several counts as on the first."""
P2P_CAPS_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py defines as a tuple by mistake."""
UNKNOWN_VALUES = {2**32 - 1, 2**64 - 1}
ECC_COUNTERS = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
LIBRARY = "libnvidia-ml.so"
WRONG_PACKAGE = "is the deprecated package pynvml, not nvidia-ml-py. Uninstall it and reinstall nvidia-ml-py."


class GpuFailed(Exception):
    """One GPU does not answer. `health` is its health then."""

    def __init__(self, health_word: str, text: str) -> None:
        super().__init__(text)
        self.health = health_word


class LibraryFailed(Exception):
    """NVML itself does not answer. `mismatch`: library and kernel module have different versions."""

    def __init__(self, text: str, *, mismatch: bool = False) -> None:
        super().__init__(text)
        self.mismatch = mismatch


class CallRefused(Exception):
    """The driver cannot or may not do or report one thing. The text is its reason, `code` NVML's error; None if the
    driver or the binding does not know the call."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code

    @property
    def absent(self) -> bool:
        """True if the GPU or its driver lacks the feature."""
        return self.code is None or self.code in UNSUPPORTED_ERRORS


class NoProcessList(Exception):
    """The driver has no list of compute processes at all, as under WSL2, as opposed to one that it refuses."""


class ProcessV1(ctypes.Structure):
    """`nvmlProcessInfo_v1_t`, for drivers that have only the unversioned process lists."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """A process as the driver lists it."""

    pid: int
    """Process id."""
    type: ProcessType
    """The list that it is on."""
    memory_bytes: int | None
    """GPU memory that it holds; None under MIG and wherever else the driver cannot tell."""


class Nvml:
    """One session with the driver's library. Not thread-safe, except for `wait_for_xid`."""

    def __init__(self) -> None:
        self.under_way: tuple[str, float] | None = None
        """The call that has not returned yet, and its monotonic start time."""
        self._list_versions: dict[str, str | None] = {}

    def open(self) -> None:
        """Open the session. Raises LibraryFailed."""
        if Path(pynvml.__file__).name != "pynvml.py":
            raise LibraryFailed(f"{pynvml.__file__} {WRONG_PACKAGE}")
        self._required_call("nvmlInit")
        self._list_versions = {name: _newest_version(name) for _, name in PROCESS_LISTS}

    def close(self) -> None:
        """Close the session; the driver then no longer counts this process as a client."""
        self.under_way = ("nvmlShutdown", time.monotonic())
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # it is closed already, or the driver is gone
        finally:
            self.under_way = None

    def driver_version(self) -> str | None:
        """Version of the driver that the library talks to."""
        return _text(self.try_call("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """Number of GPUs; getting the handle of one may still fail. Raises LibraryFailed."""
        return int(self._required_call("nvmlDeviceGetCount"))

    def handle(self, position: int) -> Any:
        """The handle of a GPU. Raises GpuFailed."""
        handle = self.try_call("nvmlDeviceGetHandleByIndex", position)
        if handle is None:
            raise GpuFailed(gpu_health.UNREADABLE, f"the driver gives no handle of GPU {position}")
        return handle

    def uuid(self, handle: Any) -> str:
        """UUID of a GPU. Raises GpuFailed if there is none, because then nothing can be said about the GPU."""
        found = _text(self.try_call("nvmlDeviceGetUUID", handle))
        if not found:
            raise GpuFailed(gpu_health.UNREADABLE, "the driver reports no UUID")
        return canonical_uuid(found)

    def bus_id(self, handle: Any) -> str | None:
        """PCI bus id, in the format of `Device.pci_bus_id`."""
        found = self.try_call("nvmlDeviceGetPciInfo", handle)
        return None if found is None else normalize_bus_id(_text(found.busId) or "")

    def name(self, handle: Any) -> str | None:
        """Product name."""
        return _text(self.try_call("nvmlDeviceGetName", handle))

    def number(self, call: str, handle: Any) -> int | None:
        """Result of a call that returns one integer; None if unknown."""
        return _known(self.try_call(call, handle))

    def memory(self, handle: Any) -> tuple[int, int] | None:
        """Total and used bytes, without what the driver reserves, or with it if the driver is too old to tell."""
        found = self.try_call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2)
        found = found or self.try_call("nvmlDeviceGetMemoryInfo", handle)
        total, used = (None, None) if found is None else (_known(found.total), _known(found.used))
        return None if total is None or used is None else (total, used)

    def activity(self, handle: Any) -> dict[str, Any]:
        """Members of a `GpuReading` that change from second to second."""
        memory = self.memory(handle)
        busy = self.try_call("nvmlDeviceGetUtilizationRates", handle)
        celsius = _known(self.try_call("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU))
        if celsius is None:  # the call above is removed in CUDA 14
            celsius = _known(self.try_call("nvmlDeviceGetTemperatureV", handle, pynvml.NVML_TEMPERATURE_GPU))
        milliwatts = _known(self.try_call("nvmlDeviceGetPowerUsage", handle))
        return {
            "memory_used_bytes": None if memory is None else memory[1],
            "utilization_ratio": None if busy is None else min(1.0, busy.gpu / 100),
            "temperature_c": None if celsius is None else float(celsius),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "compute_mode": self.compute_mode(handle),
        }

    def processes(self, handle: Any) -> list[ListedProcess] | None:
        """Every process on the GPU, once each; None if a list cannot be read, which is not an empty list.

        Raises NoProcessList if the driver has no list.
        """
        found: dict[int, ListedProcess] = {}
        for kind, name in PROCESS_LISTS:
            try:
                listed = self._list_with_retry(name, handle)
            except CallRefused as refused:
                # WSL2 has been seen to refuse lists that it lacks with either error.
                wsl = refused.code == pynvml.NVML_ERROR_UNKNOWN and driver_check.WSL_DEVICE.exists()
                # A GPU without MPS or graphics has no such processes; but every GPU can compute.
                if kind is ProcessType.COMPUTE and (wsl or refused.code == pynvml.NVML_ERROR_NOT_SUPPORTED):
                    raise NoProcessList from refused
                if kind is ProcessType.COMPUTE or not (wsl or refused.absent):
                    return None
                continue
            for pid, used in listed:
                found.setdefault(pid, ListedProcess(pid, kind, used))
        return list(found.values())

    def health_facts(self, handle: Any) -> tuple[gpu_health.HealthFacts, int | None]:
        """What decides health, except for processes and Xids; and the number of remapped rows."""
        mig = self.try_call("nvmlDeviceGetMigMode", handle)
        rows = self.try_call("nvmlDeviceGetRemappedRows", handle)
        # A GPU that can remap rows retires no pages.
        pages = self.try_call("nvmlDeviceGetRetiredPagesPendingStatus", handle) if rows is None else None
        facts = gpu_health.HealthFacts(
            recovery_action=self._recovery_action(handle),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            pages_pending=None if pages is None else pages == pynvml.NVML_FEATURE_ENABLED,
            fabric=self._fabric(handle),
            mig=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        )
        return facts, None if rows is None else int(rows[0]) + int(rows[1])

    def condition(self, handle: Any) -> dict[str, Any]:
        """Members of a `GpuReading` that describe the GPU's condition, and decide nothing."""
        corrected, uncorrected = (
            _known(self.try_call("nvmlDeviceGetTotalEccErrors", handle, kind, pynvml.NVML_VOLATILE_ECC))
            for kind in ECC_COUNTERS
        )
        mask = self.try_call("nvmlDeviceGetCurrentClocksEventReasons", handle)
        mask = self.try_call("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if mask is None else mask
        return {
            "ecc_corrected": corrected,
            "ecc_uncorrected": uncorrected,
            "throttle_reasons": None if mask is None else tuple(w for bit, w in THROTTLE_REASONS.items() if mask & bit),
        }

    def handle_by_bus_id(self, pci_bus_id: str) -> Any:
        """The handle of a GPU by its PCI bus id, which works while another GPU is lost. Raises GpuFailed, Refused."""
        return self.call("nvmlDeviceGetHandleByPciBusId", pci_bus_id.encode())

    def compute_mode(self, handle: Any) -> ComputeMode | None:
        """A GPU's current compute mode; None if the driver does not tell."""
        return COMPUTE_MODES.get(self.try_call("nvmlDeviceGetComputeMode", handle))

    def set_compute_mode(self, handle: Any, mode: ComputeMode) -> None:
        """Set the mode for contexts created from now on. Raises CallRefused: it requires root, and MIG off."""
        self.call("nvmlDeviceSetComputeMode", handle, NVML_MODES[mode])

    def link_path(self, first: Any, second: Any) -> tuple[str | None, bool | None]:
        """How two GPUs are connected, as in `GpuLink.path`, and whether each can read the other's memory."""
        wired = self.try_call("nvmlDeviceGetP2PStatus", first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        read = self.try_call("nvmlDeviceGetP2PStatus", first, second, P2P_CAPS_READ)
        peer = None if read is None else read == pynvml.NVML_P2P_STATUS_OK
        if wired == pynvml.NVML_P2P_STATUS_OK:
            return "nvlink", peer
        return TOPOLOGY_PATHS.get(self.try_call("nvmlDeviceGetTopologyCommonAncestor", first, second)), peer

    def register_xids(self, handles: Sequence[Any]) -> Any:
        """An event set for the Xids of these GPUs; None if the driver has no events."""
        events = self.try_call("nvmlEventSetCreate")
        for handle in handles if events is not None else ():
            with suppress(GpuFailed):  # its readings show what is wrong
                self.try_call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
        return events

    def wait_for_xid(self, events: Any, timeout_s: float) -> tuple[str, int] | None:
        """UUID and Xid of the next error; None if there was none in time. Raises LibraryFailed if waiting fails."""
        try:
            event = pynvml.nvmlEventSetWait_v2(events, int(timeout_s * 1000))
            return canonical_uuid(_text(pynvml.nvmlDeviceGetUUID(event.device)) or ""), int(event.eventData)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise LibraryFailed(str(error)) from error

    def free_xid_events(self, events: Any) -> None:
        """Free an event set."""
        self.try_call("nvmlEventSetFree", events)

    def try_call(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        """Result of one call; None if it is not available. Raises GpuFailed and LibraryFailed."""
        try:
            return self.call(call, *arguments, **keywords)
        except CallRefused:
            return None

    def call(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        """Result of one call. Raises CallRefused, GpuFailed and LibraryFailed."""
        function = getattr(pynvml, call, None)
        if function is None:
            raise CallRefused(f"nvidia-ml-py does not know {call}")
        self.under_way = (call, time.monotonic())
        try:
            return function(*arguments, **keywords)
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_ERRORS:
                mismatch = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
                raise LibraryFailed(str(error), mismatch=mismatch) from error
            if error.value in HEALTH_BY_ERROR:
                raise GpuFailed(HEALTH_BY_ERROR[error.value], str(error)) from error
            raise CallRefused(str(error), error.value) from error
        except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError: the library lacks a function
            raise CallRefused(str(error)) from error
        except UnicodeDecodeError as error:  # a failing GPU may return a garbled name
            raise CallRefused(f"{call} did not return valid UTF-8: {error}") from error
        finally:
            self.under_way = None

    def _required_call(self, call: str) -> Any:
        """Result of a call that NVML is useless without. Raises LibraryFailed."""
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

    def _list_with_retry(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """As `_list`, repeated once if processes were added meanwhile."""
        try:
            return self._list(name, handle)
        except CallRefused as refused:
            if refused.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise
            return self._list(name, handle)

    def _list(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """Pid and memory of each process on one list. Raises CallRefused and GpuFailed."""
        version = self._list_versions[name]
        if version is None:
            raise CallRefused(f"the driver has no {name}")
        if version == "":
            return self._list_v1(name, handle)
        return [(int(one.pid), _known(one.usedGpuMemory)) for one in self.call(name + version, handle)]

    def _list_v1(self, name: str, handle: Any) -> list[tuple[int, int | None]]:
        """A list by its oldest call, which nvidia-ml-py no longer offers: one call for the size, one for the list."""
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
        if answer in HEALTH_BY_ERROR:
            raise GpuFailed(HEALTH_BY_ERROR[answer], name)
        if answer != pynvml.NVML_SUCCESS:
            raise CallRefused(f"{name} fails with {answer}", answer)
        return [(int(one.pid), _known(one.usedGpuMemory)) for one in entries[: count.value]]

    def _fabric(self, handle: Any) -> str | None:
        """State of a GPU in its NVLink fabric; None if it is on none or the driver does not tell."""
        for call, struct in FABRIC_CALLS:
            info = getattr(pynvml, struct)()
            if self.try_call(call, handle, ctypes.byref(info)) is None:
                continue
            number = int(info.state)
            if number == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status != pynvml.NVML_SUCCESS:
                return FABRIC_FAILED
            return FABRIC_STATES.get(number, f"state_{number}") if number else None
        return None

    def _recovery_action(self, handle: Any) -> str | None:
        found = self.try_call("nvmlDeviceGetFieldValues", handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if found is None or found[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        number = int(found[0].value.uiVal)
        return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else f"action_{number}"


def _newest_version(name: str) -> str | None:
    """The newest version of a process list that the library and nvidia-ml-py read alike; None if there is none.

    Drivers 535.43 to 535.86 return a longer struct from `_v3`, which nvidia-ml-py would misread. They
    are recognized by supporting confidential computing but not `nvmlDeviceGetRunningProcessDetailList`.
    """
    longer = _library_has("nvmlDeviceGetConfComputeMemSizeInfo") and not _library_has(
        "nvmlDeviceGetRunningProcessDetailList"
    )
    for version in ("_v3", "_v2"):
        if _library_has(name + version) and hasattr(pynvml, name + version) and not (longer and version == "_v3"):
            return version
    return "" if _library_has(name) else None


def _library_has(symbol: str) -> bool:
    try:
        pynvml._nvmlGetFunctionPointer(symbol)
    except pynvml.NVMLError:
        return False
    return True


def _known(number: int | None) -> int | None:
    """The number, or None for the driver's value for unknown: all bits set."""
    return None if number is None or number in UNKNOWN_VALUES else int(number)


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def normalize_bus_id(text: str) -> str:
    """A PCI bus id with an 8-digit domain and upper-case hex, however the driver spells it."""
    domain, colon, rest = text.upper().partition(":")
    return f"{domain.zfill(8)}{colon}{rest}"
