"""A stand-in machine with eight GPUs and a realistic driver; `machine.h` describes its parts.

`DriverMachine` owns one: it builds the libraries, starts trainings that use them, injects faults, and plays the kernel
that notices the end of processes. It records what a daemon can only infer: who used which GPU until when.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

SOURCES = Path(__file__).parent
GPUS, ENTRIES, XIDS, LEASE_BYTES, DEVICE_BYTES = 8, 256, 256, 64, 4096
UUIDS = [f"GPU-d0000000-0000-0000-0000-00000000000{gpu}" for gpu in range(GPUS)]
FREE, LIVE, DYING, UNLISTED = range(4)
CLIENT, COMPUTE, GRAPHICS = range(3)
FABRIC_IN_PROGRESS, FABRIC_COMPLETED = 2, 3
LIST_US, LIST_EACH_US, CONTEXT_US = 5000, 100, 100_000
"""Microseconds under the driver's lock: for a process list, for each context on it, and for creating a context."""
UNLIST_S, FREE_S = (0.01, 0.05), (0.05, 0.3)
"""Minimum and maximum: how long a context is listed and keeps its memory after its process has ended."""
SWEEP_S = 0.01
"""How often the simulated kernel checks for ended processes: the resolution of the record."""
LOCK_QUERY = "hhqqi0q"
"""`struct flock` of fcntl(2)."""


class GpuState(ctypes.Structure):
    """`struct gpu` of machine.h."""

    _fields_ = (
        ("lost", ctypes.c_int32),
        ("fabric", ctypes.c_int32),
        ("recovery", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("blocked_until_ns", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
    )


class EntryState(ctypes.Structure):
    """`struct entry` of machine.h."""

    _fields_ = (
        ("state", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("gpu", ctypes.c_int32),
        ("opened", ctypes.c_uint32),
        ("unused", ctypes.c_int32),
        ("bytes", ctypes.c_int64),
        ("made_ns", ctypes.c_int64),
        ("lease", ctypes.c_char * LEASE_BYTES),
    )


class MachineState(ctypes.Structure):
    """`struct machine` of machine.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("attach_us", ctypes.c_int32),
        ("list_us", ctypes.c_int32),
        ("list_each_us", ctypes.c_int32),
        ("context_us", ctypes.c_int32),
        ("xids", ctypes.c_uint32),
        ("xid", ctypes.c_int32 * 2 * XIDS),
        ("gpu", GpuState * GPUS),
        ("entry", EntryState * ENTRIES),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A driver object that a process has or had: a client, or a context on a GPU."""

    pid: int
    """The process that created it; a forked child may keep it long after that process has ended."""
    lease_id: str
    """GPULEASE_LEASE_ID of that process; empty if it had none."""
    gpu: int | None
    """The GPU that a context is on; None for a client."""
    opened: frozenset[int]
    """GPUs with a device file that a client had open."""
    made_at_s: float
    """Monotonic time of its creation; that clock is the same for all processes."""
    dead_at_s: float | None = None
    """When its last process had ended."""
    freed_at_s: float | None = None
    """When its memory was free."""

    def concerns(self, gpu: int) -> bool:
        """True if it is on this GPU or has its device file open."""
        return gpu == self.gpu or gpu in self.opened


@dataclass(slots=True)
class Ending:
    """An entry after its last process has ended."""

    entry: Entry
    unlist_at_s: float
    free_at_s: float


def build(directory: Path) -> None:
    """Compile the libraries and the training into a directory. Takes a second; done once per test session."""
    flags = ["gcc", "-O1", "-Wall", "-Werror", "-Wno-unused-function", "-pthread"]
    for source, target in (("nvml.c", "libnvidia-ml.so.1"), ("cuda.c", "libcuda.so.1")):
        subprocess.run([*flags, "-shared", "-fPIC", "-o", directory / target, SOURCES / source, "-ldl"], check=True)
    subprocess.run([*flags, "-o", directory / "training", SOURCES / "training.c", "-ldl"], check=True)


@contextmanager
def driver_machine() -> Iterator[DriverMachine]:
    """A new idle machine."""
    with tempfile.TemporaryDirectory() as built:
        build(Path(built))
        found = DriverMachine(Path(built))
    try:
        yield found
    finally:
        found.close()


class DriverMachine:
    """A running machine. Its settings may change while daemons and trainings run on it.

    Args:
        built: The directory of `build`.
        seed: Of the times that teardowns take.
    """

    def __init__(self, built: Path, seed: int = 0) -> None:
        # Every user must be able to traverse it, which pytest's directories do not allow.
        self.directory = Path(tempfile.mkdtemp(prefix="gpulease-driver-"))
        self.directory.chmod(0o755)
        for name in ("libnvidia-ml.so.1", "libcuda.so.1", "training"):
            shutil.copy(built / name, self.directory)
        for gpu in range(GPUS):
            self._file(f"nvidia{gpu}", DEVICE_BYTES)
        for name in ("locks", "clients", "violations"):
            self._file(name, 0)
        self._file("machine", ctypes.sizeof(MachineState))
        with (self.directory / "machine").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.state: Any = MachineState.from_buffer(self._memory)
        self.state.size = ctypes.sizeof(MachineState)
        self.unlist_s = UNLIST_S
        """How long a context is still listed after its last process has ended, minimum and maximum."""
        self.free_s = FREE_S
        """How long its memory is still in use, minimum and maximum."""
        self._started: list[subprocess.Popen[str]] = []
        self.ended: list[Entry] = []
        """Everything that has ended, in the order in which its memory was freed."""
        self._chance = random.Random(seed)
        self._endings: dict[int, Ending] = {}
        self._entries: list[Entry] = []
        self._clients = os.open(self.directory / "clients", os.O_RDWR | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._kernel = threading.Thread(target=self._run, name="kernel", daemon=True)
        self._kernel.start()
        self.quieten()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process use this machine's driver. Jobs get them from the worker."""
        return {
            "LD_LIBRARY_PATH": str(self.directory),
            "GPULEASE_DEVICE_FILES": str(self.directory / "nvidia"),
        }

    @property
    def program(self) -> str:
        """Path of the training program."""
        return str(self.directory / "training")

    def start(
        self, *options: str, env: Mapping[str, str] | None = None, wait: bool = True, name: str = "training"
    ) -> subprocess.Popen[str]:
        """Start a training with these options (see training.c) and the variables of its lease. Returns once ready.

        `name`: what it calls itself; `wait`: False to go on without it.
        """
        names = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "CUDA_"))}
        started = subprocess.Popen(
            [name, *options],
            executable=self.program,
            env=names | self.environment | dict(env or {}),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(started)
        if wait:
            assert started.stdout is not None
            line = started.stdout.readline()
            assert line.startswith("ready "), line or f"it ended with {started.wait()}"
        return started

    def started(self, name: str) -> list[subprocess.Popen[str]]:
        """The trainings that were started under this name."""
        return [process for process in self._started if isinstance(process.args, list) and process.args[0] == name]

    # Faults.

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus, with the corresponding Xid."""
        self.state.gpu[gpu].lost = 1
        self.xid(gpu, 79)

    def restore(self, gpu: int) -> None:
        """Let the GPU answer again."""
        self.state.gpu[gpu].lost = 0

    def xid(self, gpu: int, number: int) -> None:
        """Report an Xid to every listener."""
        place = self.state.xid[self.state.xids % XIDS]
        place[0], place[1] = gpu, number
        self.state.xids += 1

    def block(self, seconds: float, gpu: int | None = None) -> None:
        """Let calls on one GPU, or on any, return only after this time, as during a teardown that hangs."""
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        for each in range(GPUS) if gpu is None else (gpu,):
            self.state.gpu[each].blocked_until_ns = until_ns

    def fabric(self, state: int, *gpus: int) -> None:
        """Set the state of the fabric on some GPUs, or on all."""
        for gpu in gpus or range(GPUS):
            self.state.gpu[gpu].fabric = state

    def slow_lists(self, list_s: float, each_s: float = 0.0001) -> None:
        """Set how long one process list takes under the driver's lock, and how much longer per context."""
        self.state.list_us, self.state.list_each_us = int(list_s * 1e6), int(each_s * 1e6)

    # The record of what is true.

    @property
    def entries(self) -> list[Entry]:
        """Everything that is open or in use now."""
        if self._failure is not None:
            raise self._failure
        return list(self._entries)

    def left_of(self, lease_id: str, gpu: int) -> list[Entry]:
        """What a lease's processes have open or in use on a GPU now."""
        return [entry for entry in self.entries if entry.lease_id == lease_id and entry.concerns(gpu)]

    def gone_at_s(self, lease_id: str, gpu: int) -> float | None:
        """When a lease's last memory and open file on a GPU was gone; None if there still is any or never was."""
        if self.left_of(lease_id, gpu):
            return None
        freed = [one.freed_at_s for one in self.ended if one.lease_id == lease_id and one.concerns(gpu)]
        return max((at_s for at_s in freed if at_s is not None), default=None)

    def violations(self) -> list[str]:
        """One line per context on a GPU that another lease still used."""
        return (self.directory / "violations").read_text().splitlines()

    def quieten(self) -> None:
        """End every training, repair all faults and forget what has ended. Returns when nothing is left."""
        for gpu in self.state.gpu:
            gpu.lost, gpu.fabric, gpu.recovery, gpu.blocked_until_ns, gpu.kept_bytes = 0, FABRIC_COMPLETED, 0, 0, 0
        self.state.list_us, self.state.list_each_us, self.state.context_us = LIST_US, LIST_EACH_US, CONTEXT_US
        self.state.attach_us = 0
        self.unlist_s, self.free_s = UNLIST_S, FREE_S
        self._end_trainings()
        while any(entry.gpu is not None for entry in self.entries):
            time.sleep(SWEEP_S)
        self.ended.clear()

    def close(self) -> None:
        """End the machine and every training on it. A daemon on it must have ended before."""
        self._closing.set()
        self._kernel.join()
        self._end_trainings()
        os.close(self._clients)
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._failure is not None:
            raise self._failure

    def _end_trainings(self) -> None:
        """All processes of this machine's training program: started here, started by jobs, and left behind."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(place / "exe") == self.program:
                    os.kill(int(place.name), signal.SIGKILL)
        for process in self._started:
            with process:
                process.kill()
        self._started.clear()

    def _file(self, name: str, size: int) -> None:
        path = self.directory / name
        path.touch()
        os.truncate(path, size)
        path.chmod(0o666)

    # The simulated kernel.

    def _run(self) -> None:
        try:
            while not self._closing.wait(SWEEP_S):
                self._sweep()
        except BaseException as error:
            self._failure = error
            raise

    def _sweep(self) -> None:
        """Check which entries have lost their last process, and advance those."""
        now_s, found = time.monotonic(), []
        for slot in range(ENTRIES):
            state = self.state.entry[slot]
            if state.state == FREE:
                continue
            if slot not in self._endings and not self._is_open(slot):
                self._endings[slot] = self._ending(_entry(state), now_s)
                state.state = DYING
            ending = self._endings.get(slot)
            if ending is None:
                found.append(_entry(state))
            elif now_s >= ending.free_at_s:
                self._free(slot, ending)
            else:
                found.append(ending.entry)
                if now_s >= ending.unlist_at_s:
                    state.state = UNLISTED
        self._entries = found

    def _ending(self, entry: Entry, now_s: float) -> Ending:
        dead = replace(entry, dead_at_s=now_s)
        if entry.gpu is None:  # closing a file takes no time
            return Ending(dead, now_s, now_s)
        unlist_at_s = now_s + self._chance.uniform(*self.unlist_s)
        return Ending(dead, unlist_at_s, max(unlist_at_s, now_s + self._chance.uniform(*self.free_s)))

    def _free(self, slot: int, ending: Ending) -> None:
        del self._endings[slot]
        # The stamp comes first: no one can see the GPU clean before the record says that it is.
        self.ended.append(replace(ending.entry, freed_at_s=time.monotonic()))
        self.state.entry[slot].state = FREE

    def _is_open(self, slot: int) -> bool:
        """True while any process has the open file that carries the entry's lock."""
        query = struct.pack(LOCK_QUERY, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        answer = struct.unpack(LOCK_QUERY, fcntl.fcntl(self._clients, fcntl.F_OFD_GETLK, query))
        return cast(int, answer[0]) != fcntl.F_UNLCK


def _entry(state: Any) -> Entry:
    return Entry(
        pid=state.pid,
        lease_id=state.lease.decode(),
        gpu=None if state.kind == CLIENT else state.gpu,
        opened=frozenset(gpu for gpu in range(GPUS) if state.opened >> gpu & 1),
        made_at_s=state.made_ns / 1e9,
    )
