"""NvmlReader with the real binding, on a stand-in for the driver's library: driver generations and faults."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.cuda import libcuda
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import GpuLink, GpuReading, LeaseState, Process
from gpulease_worker.probe import cuda_init_check, nvml_check, nvml_reader, opener_classifier
from gpulease_worker.probe.nvml_reader import reopen_pause_s
from gpulease_worker.probe.probe_client import STARTING, ProbeClient
from gpulease_worker.probe.probe_protocol import Pace, Reading
from tests.client.stand_in_cuda import Card, Cuda, machine, no_cuda
from tests.worker.build import lease, under, until
from tests.worker.stand_in import (
    DRIVER_NOT_LOADED,
    EVERY,
    GIB,
    GPU_IS_LOST,
    HANGS,
    LINKS,
    MEMORY,
    MISMATCH,
    NO_PERMISSION,
    NOT_READY,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    POOR,
    RESET_REQUIRED,
    THIRD,
    UNINITIALIZED,
    UNKNOWN,
    VERSION,
    WHOLE,
    Driver,
    ProbeProcess,
    silent,
)

LISTS = "nvmlDeviceGetComputeRunningProcesses_v3"
SET_IN_DRIVER_CHECK = "from pathlib import Path; from gpulease_worker.probe import driver_check; driver_check."
ON_WSL = f"{SET_IN_DRIVER_CHECK}WSL_DEVICE = Path('/dev/null')"
UNLISTED = replace(WHOLE, health="processes_unknown", processes=())
GRAPHICS, MPS = "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
OF_POOR, OF_WHOLE = (Card(gpu.uuid[4:].replace("-", "")) for gpu in (POOR, WHOLE))
"""As CUDA shows them."""
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (x@y)\nGCC version: gcc 12.2.0\n"


@pytest.fixture(scope="module")
def shared_probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, ProbeProcess]]:
    """A probe that has read nothing that one of its tests could be taken in by, and its driver."""
    library = Driver(tmp_path_factory.mktemp("shared"))
    with library.probe() as probe:
        yield library, probe


def test_a_current_driver_is_read_exactly_in_pci_order_and_what_it_cannot_tell_is_none(tmp_path: Path) -> None:
    assert Driver(tmp_path).read() == Reading(gpus=(POOR, WHOLE), links=LINKS, driver_version=VERSION)


def test_some_gpus_are_read_alone_with_their_places_among_all(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    with library.probe() as probe:
        assert probe.read().gpus == (POOR, WHOLE, THIRD)
        library.says(("count", EVERY, 3), ("gone", 0, 1), ("nvmlDeviceGetMemoryInfo_v2", 1, GPU_IS_LOST))
        assert probe.read_some(THIRD.uuid) == Reading(gpus=(THIRD,), whole=False, reread=(THIRD.uuid,))
        assert probe.read_some(WHOLE.uuid).gpus[0].processes == ()
        assert probe.read_some("GPU-00000000-0000-0000-0000-00000000dead").gpus == ()
        assert len(probe.read().gpus) == 3


@pytest.mark.parametrize(
    ("flags", "used_bytes"),
    [
        pytest.param(("BEFORE_510",), 4 * GIB, id="before 510: no memory v2, process lists v2"),
        pytest.param(("BEFORE_510", "LISTS_V1"), 4 * GIB, id="only the first process lists"),
        pytest.param(("LONG_STRUCT",), 3 * GIB, id="535.43: process lists v3 in a longer struct"),
        pytest.param(("NO_FABRIC",), 3 * GIB, id="before 525: nothing of NVLink fabrics"),
        pytest.param(("CUDA_14",), 3 * GIB, id="CUDA 14: temperature by the newer call alone"),
    ],
)
def test_an_older_driver_is_read_by_the_calls_that_it_has(
    tmp_path: Path, flags: tuple[str, ...], used_bytes: int
) -> None:
    assert Driver(tmp_path, *flags).read().gpus == (POOR, replace(WHOLE, memory_used_bytes=used_bytes))


def test_a_gpu_that_may_not_be_opened_leaves_the_others_their_readings(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3), ("nvmlDeviceGetHandleByIndex_v2", 0, NO_PERMISSION))
    reading = library.read()
    assert reading.problem is None
    assert reading.gpus == (POOR, replace(THIRD, index=1)), "and of the one that cannot be named nothing is said"


@pytest.mark.parametrize(
    ("matters", "expected"),
    [
        pytest.param((), WHOLE, id="sound"),
        pytest.param(
            ((LISTS, 0, NO_PERMISSION),),
            UNLISTED,
            id="lists that may not be read are not empty",
        ),
        *(
            pytest.param(
                ((LISTS, 0, code),),
                UNLISTED,
                id=f"lists that cannot be read ({code}) are not empty",
            )
            for code in (UNKNOWN, OPERATING_SYSTEM, MEMORY, NOT_READY)
        ),
        *(
            pytest.param(
                (("nvmlDeviceGetPowerUsage", 0, code),), replace(WHOLE, power_w=None), id=f"a value is refused ({code})"
            )
            for code in (UNKNOWN, OPERATING_SYSTEM, MEMORY, NOT_READY)
        ),
        pytest.param(
            (("nvmlDeviceGetMemoryInfo", 0, NOT_SUPPORTED), ("nvmlDeviceGetMemoryInfo_v2", 0, NOT_SUPPORTED)),
            replace(WHOLE, memory_total_bytes=None, memory_used_bytes=None),
            id="integrated: no memory of its own",
        ),
        pytest.param(
            (("odd", 0, 1),),
            replace(
                WHOLE,
                **dict.fromkeys(("memory_total_bytes", "memory_used_bytes", "temperature_c", "power_w")),
                ecc_corrected=None,
                ecc_uncorrected=None,
            ),
            id="a number with every bit set is none",
        ),
        pytest.param(
            ((GRAPHICS, 0, NO_PERMISSION),),
            UNLISTED,
            id="nor is one of the other lists empty when it may not be read",
        ),
        pytest.param(
            ((MPS, 0, UNKNOWN),),
            UNLISTED,
            id="or cannot be read",
        ),
        pytest.param(
            ((GRAPHICS, 0, NOT_SUPPORTED), (MPS, 0, NOT_SUPPORTED)),
            replace(WHOLE, processes=WHOLE.processes[:2]),
            id="a GPU that has no graphics and no MPS",
        ),
        pytest.param((("nvmlDeviceRegisterEvents", 0, GPU_IS_LOST),), WHOLE, id="its Xids cannot be had"),
        pytest.param((("garbled", 0, 1),), replace(WHOLE, name=None), id="a name that is no text is none"),
        pytest.param((("mig", 0, 1),), replace(WHOLE, health="mig", mig=True), id="split by MIG"),
        pytest.param(
            (("action", 0, 1),),
            replace(WHOLE, health="reset_required", recovery_action="gpu_reset"),
            id="wants a reset",
        ),
        pytest.param(
            (("action", 0, 2),),
            replace(WHOLE, health="reboot_required", recovery_action="node_reboot"),
            id="wants a reboot",
        ),
        pytest.param(
            (("action", 0, 3),),
            replace(WHOLE, recovery_action="drain_p2p", warnings=("drain_p2p",)),
            id="can be worked on",
        ),
        pytest.param(
            (("action", 0, 77),),
            replace(WHOLE, health="reset_required", recovery_action="action_77"),
            id="wants something that is not known yet",
        ),
        pytest.param((("remap", 0, 1),), replace(WHOLE, warnings=("row_remap_pending",)), id="a row waits for a reset"),
        pytest.param(
            (("retired", 0, 1),),
            replace(WHOLE, remapped_rows=None, warnings=("retired_pages_pending",)),
            id="before Ampere: a page waits for a reset",
        ),
        pytest.param((("fabric", 0, 3),), replace(WHOLE, fabric="completed"), id="on an NVLink fabric that is ready"),
        pytest.param((("raced", 0, 1),), WHOLE, id="a process comes while the lists are read"),
        pytest.param(
            (("raced", 0, 9),),
            UNLISTED,
            id="processes come all the time",
        ),
        pytest.param((("remap", 0, 2),), replace(WHOLE, health="row_remap_failed"), id="no spare row is left"),
        pytest.param(
            (("nvmlDeviceGetUtilizationRates", 0, RESET_REQUIRED),),
            silent(WHOLE, "reset_required"),
            id="any call may say that it wants a reset",
        ),
    ],
)
def test_what_ails_a_gpu_is_said_in_one_word_and_concerns_it_alone(
    shared_probe: tuple[Driver, ProbeProcess], matters: tuple[tuple[str, int, object], ...], expected: GpuReading
) -> None:
    library, probe = shared_probe
    library.says(("nvmlDeviceGetTemperature", 0, UNINITIALIZED))
    assert probe.read().problem is not None, "the next reading begins a new session"
    library.says(*matters)
    assert probe.read().gpus == (POOR, expected)


@pytest.mark.parametrize(
    ("matters", "call", "index", "ailing"),
    [
        pytest.param((), "nvmlDeviceGetComputeMode", 1, POOR, id="prohibited"),
        pytest.param((("mig", 0, 1),), "nvmlDeviceGetMigMode", 0, replace(WHOLE, health="mig", mig=True), id="MIG"),
        pytest.param(
            (("action", 0, 1),),
            "nvmlDeviceGetFieldValues",
            0,
            replace(WHOLE, health="reset_required", recovery_action="gpu_reset"),
            id="wants a reset",
        ),
        pytest.param(
            (("remap", 0, 2),),
            "nvmlDeviceGetRemappedRows",
            0,
            replace(WHOLE, health="row_remap_failed", remapped_rows=None),
            id="no spare row is left",
        ),
    ],
)
def test_a_gpu_that_may_not_be_granted_stays_so_while_the_driver_does_not_tell_it(
    tmp_path: Path, matters: tuple[tuple[str, int, object], ...], call: str, index: int, ailing: GpuReading
) -> None:
    library = Driver(tmp_path)
    library.says(*matters)
    with library.probe() as probe:
        probe.read()
        fails = (*matters, (call, index, UNKNOWN))
        library.says(*fails)
        assert ailing in probe.read().gpus
        library.says(*fails, ("nvmlDeviceGetTemperature", index, GPU_IS_LOST))
        assert silent(ailing, "lost") in probe.read().gpus
        library.says(*fails)
        assert ailing in probe.read().gpus, "it answers again, but not this"
        library.says(*fails, ("nvmlDeviceGetTemperature", index, UNINITIALIZED))
        assert probe.read().problem is not None, "the next reading begins a new session"
        library.says(*fails)
        assert ailing in probe.read().gpus
        library.says()
        assert probe.read().gpus == (POOR, WHOLE), "the driver tells it again"


def test_a_gpu_that_is_lost_keeps_its_name_and_recovers_without_a_restart(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe() as probe:
        assert probe.read().gpus == (POOR, WHOLE)
        library.says(("nvmlDeviceGetHandleByIndex_v2", 0, GPU_IS_LOST))
        assert probe.read().gpus == (POOR, silent(WHOLE, "lost"))
        assert probe.read(complete=False).gpus == (POOR, silent(WHOLE, "lost"))
        library.says(("nvmlDeviceGetTemperature", 0, GPU_IS_LOST))
        assert probe.read(complete=False).gpus == (POOR, silent(WHOLE, "lost")), "whichever call says so"
        library.says()
        assert probe.read(complete=False).gpus == (POOR, WHOLE), "everything is read again"


def test_nvml_is_reopened_less_often_for_a_gpu_that_stays_lost() -> None:
    assert [reopen_pause_s(30.0, lost_s) for lost_s in (0.0, 299.0, 600.0, 86400.0)] == [30.0, 30.0, 60.0, 8640.0]


def test_a_gpu_that_fell_off_the_bus_is_lost_also_in_the_next_session(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    with library.probe(Pace(health_s=0.05, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR, WHOLE, THIRD)
        library.says(("count", EVERY, 3), ("nvmlDeviceGetHandleByIndex_v2", 2, GPU_IS_LOST))
        assert probe.read().gpus[2] == silent(THIRD, "lost")
        library.says()
        until(lambda: probe.read(complete=False).gpus == (POOR, WHOLE, silent(THIRD, "lost")), "NVML was reopened")
        library.says(("count", EVERY, 3))
        until(lambda: probe.read(complete=False).gpus == (POOR, WHOLE, THIRD), "it is found again")


def test_a_gpu_that_comes_back_before_the_next_session_is_there_once(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    with library.probe(Pace(health_s=3600, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR, WHOLE, THIRD)
        library.says()
        assert probe.read().gpus == (POOR, WHOLE, silent(THIRD, "lost")), "the driver counts it no more"
        library.says(("count", EVERY, 3))
        assert probe.read().gpus == (POOR, WHOLE, THIRD)


def test_a_gpu_that_did_not_answer_when_the_session_began_is_watched_for_xids_once_it_does(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("nvmlDeviceGetHandleByIndex_v2", 0, UNKNOWN))
    with library.probe(Pace(health_s=3600, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR,)
        library.says()
        assert probe.read().gpus == (POOR, WHOLE)
        library.says(("xid", 0, 79))
        until(lambda: probe.read(complete=False).gpus[1].health == "xid:79", "it is told", 30)


def test_a_gpu_that_is_lost_when_its_probe_is_replaced_keeps_its_name_and_the_others_their_indices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Driver(tmp_path)
    library.install(monkeypatch)

    async def story() -> None:
        probe = ProbeClient("n", None, 30.0)
        try:
            while not (first := await probe.read(())).gpus:
                pass
            assert first.gpus == (POOR, WHOLE)
            await probe._kill()
            library.says(("nvmlDeviceGetHandleByIndex_v2", 1, GPU_IS_LOST))
            while not (second := await probe.read(())).gpus:
                pass
            assert second.gpus == (silent(POOR, "lost"), WHOLE)
            library.says()
            assert (await probe.read(())).gpus == (POOR, WHOLE)
        finally:
            await probe.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_an_xid_of_the_gpus_own_counts_until_it_has_recovered_and_an_applications_does_not(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    seen = [("xid", 0, xid) for xid in (13, 31, 43, 8, 63, 69, 94, 154, 109, 45, 68)]
    with library.probe(Pace(health_s=1.5, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR, WHOLE)
        library.says(*seen)
        shown = [WHOLE]
        while shown[-1] == WHOLE:
            shown.append(probe.read(complete=False).gpus[1])
        until(
            lambda: shown.append(probe.read(complete=False).gpus[1]) or shown[-1] == WHOLE,
            "the driver says it is sound",
        )
        assert {gpu.health for gpu in shown} == {"ok", "xid:109"}
        library.says(*seen, ("xid", 0, 48), ("action", 0, 1))
        until(lambda: probe.read().gpus[1].health == "reset_required", "what the driver wants comes first")


def test_while_one_gpu_is_lost_the_xids_of_the_others_are_heard_of(tmp_path: Path) -> None:
    """The driver fails every wait on an event set with a lost GPU."""
    library = Driver(tmp_path)
    three, lost = ("count", EVERY, 3), ("nvmlDeviceGetHandleByIndex_v2", 0, GPU_IS_LOST)
    library.says(three)
    with library.probe(Pace(health_s=3600, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR, WHOLE, THIRD)
        library.says(three, lost)
        until(lambda: probe.read(complete=False).gpus[1] == silent(WHOLE, "lost"), "it is lost")
        library.says(three, lost, ("xid", 2, 79))
        until(lambda: probe.read(complete=False).gpus[2].health == "xid:79", "the other one is heard of", 30)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_event_set_is_not_given_back_while_the_driver_waits_on_it(tmp_path: Path, hangs: bool) -> None:
    library = Driver(tmp_path)
    waits = (("waits", EVERY, HANGS),) if hangs else ()
    library.says(("count", EVERY, 3), *waits, ("nvmlDeviceGetHandleByIndex_v2", 2, UNKNOWN))
    with library.probe(Pace(health_s=3600, call_deadline_s=20)) as probe:
        assert probe.read().gpus == (POOR, WHOLE)
        library.says(("count", EVERY, 3), *waits)
        assert probe.read().gpus == (POOR, WHOLE, THIRD), "a new watch takes the place of the first"
        assert Path(f"{library.variables['STAND_IN_NVML']}.freed").exists() is not hangs


def test_a_critical_xid_outlasts_the_probe_that_saw_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Driver(tmp_path)
    library.install(monkeypatch)

    async def story() -> None:
        probe = ProbeClient("n", None, 30.0)
        try:
            library.says(("xid", 0, 79))
            while not (first := await probe.read(())).gpus or first.gpus[1].health == "ok":
                pass
            await probe._kill()
            library.says()
            while not (second := await probe.read(())).gpus:
                pass
            assert [reading.gpus[1].health for reading in (first, second)] == ["xid:79", "xid:79"]
        finally:
            await probe.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_between_two_whole_readings_processes_are_repeated_and_that_is_said(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe(Pace(processes_s=3600, call_deadline_s=20)) as probe:
        assert probe.read(complete=True).whole
        library.says(("gone", 0, 1), ("remap", 0, 1), ("nvmlDeviceGetPowerUsage", 0, NOT_SUPPORTED))
        second = probe.read(complete=False)
        assert not second.whole
        assert second.gpus[1] == replace(WHOLE, power_w=None), "power is read every time"
        third = probe.read(complete=True)
        assert third.whole
        assert (third.gpus[1].processes, third.gpus[1].warnings) == ((), ("row_remap_pending",))


def test_processes_are_read_again_when_they_are_due(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe(Pace(processes_s=0.05, call_deadline_s=20)) as probe:
        probe.read()
        library.says(("gone", 0, 1))
        until(lambda: not probe.read(complete=False).gpus[1].processes, "they are due")


def test_who_comes_or_goes_is_seen_by_the_memory_before_the_lists_are_due(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe(Pace(processes_s=3600, call_deadline_s=20)) as probe:
        assert probe.read().gpus[1].processes
        library.says(("idle", 0, 1))
        gone = probe.read(complete=False)
        assert not gone.gpus[1].processes
        assert not gone.whole, "only this GPU was read again"
        library.says()
        assert probe.read(complete=False).gpus[1] == WHOLE


AS_ROOT = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)))
CONTAINER = (*AS_ROOT, "--pid", "--fork", "--kill-child")
"""Starts a probe in a private PID namespace."""
MIB = 2**20


def test_memory_in_use_without_a_process_is_someone_elses_where_others_are_hidden(tmp_path: Path) -> None:
    """Without the host's PID namespace the driver lists no processes outside it, and GPUs in use look free."""
    library = Driver(tmp_path)
    library.says(("gone", 0, 1))
    for within, hidden in (((), False), (CONTAINER, True)):
        with library.probe(within=within) as probe:
            poor, in_use = probe.read().gpus
            assert (in_use.processes, in_use.hidden_use) == ((), hidden)
            assert poor.hidden_use is hidden, "memory that the driver does not tell is not none"
            library.says(("idle", 0, 1))
            assert not probe.read().gpus[1].hidden_use, "an idle GPU is free in a container as well"
            library.says(("gone", 0, 1))


FABRIC_STATES = [
    ("not_started", (("fabric", 0, 1),)),
    ("in_progress", (("fabric", 0, 2), ("fabric_status", 0, UNKNOWN))),  # a status counts only once it has completed
    ("failed", (("fabric", 0, 3), ("fabric_status", 0, UNKNOWN))),
]


@pytest.mark.parametrize("flags", [(), ("FABRIC_V1",)], ids=["now", "before its second version"])
@pytest.mark.parametrize(("state", "matters"), FABRIC_STATES, ids=[state for state, _ in FABRIC_STATES])
def test_a_gpu_whose_fabric_is_not_ready_is_not_sound_until_it_is_where_cuda_cannot_be_asked(
    tmp_path: Path, flags: tuple[str, ...], state: str, matters: tuple[tuple[str, int, object], ...]
) -> None:
    library = Driver(tmp_path, *flags)
    no_cuda(tmp_path)
    library.says(*matters)
    with library.probe(Pace(health_s=0.05, call_deadline_s=20)) as probe:
        for _ in range(20):
            assert probe.read().gpus == (POOR, replace(WHOLE, fabric=state, health="fabric_not_ready"))
        library.says(("fabric", 0, 3))
        assert probe.read().gpus == (POOR, replace(WHOLE, fabric="completed")), "by itself, at the next reading"
        library.says(*matters)
        assert probe.read().gpus[1].health == "fabric_not_ready"


def test_cuda_has_the_last_word_on_a_gpu_whose_fabric_is_not_ready(tmp_path: Path) -> None:
    library, fails = Driver(tmp_path), tmp_path / "fails"
    cuda = Cuda(tmp_path)
    library.environment |= {"STAND_IN_CUDA": machine(OF_POOR, OF_WHOLE)}
    library.environment |= {"STAND_IN_FAILS": str(fails), "STAND_IN_CALLS": str(cuda.calls)}
    in_progress = replace(WHOLE, fabric="in_progress", health="fabric_not_ready")
    fails.write_text("802")
    library.says(("fabric", 0, 2))
    with library.probe(Pace(health_s=0.1, call_deadline_s=20)) as probe:
        until(lambda: probe.read().gpus == (POOR, in_progress) and len(asked(cuda)) > 2, "asked, and asked again")
        fails.write_text("")
        usable = replace(in_progress, health="ok", warnings=("fabric_not_ready",))
        until(lambda: probe.read().gpus[1] == usable, "CUDA starts all the same")
        library.says(("fabric", 0, 1))
        fails.write_text("802")
        assert probe.read().gpus[1].health == "fabric_not_ready", "what was said in another state does not count"
        library.says(("fabric", 0, 3))
        assert probe.read().gpus[1] == replace(WHOLE, fabric="completed")
        assert str(probe.process.pid) not in asked(cuda), "CUDA is never initialised in the probe"


def test_a_probe_that_ends_while_cuda_hangs_leaves_nothing_behind(tmp_path: Path) -> None:
    library, cuda = Driver(tmp_path), Cuda(tmp_path)
    library.environment |= {"STAND_IN_FAILS": "hang", "STAND_IN_CALLS": str(cuda.calls)}
    library.says(("fabric", 0, 2))
    with library.probe() as probe:
        until(lambda: asked(cuda), "CUDA is asked")
        (pid,) = asked(cuda)
        begun_s = time.monotonic()
        assert probe.read().gpus[1].health == "fabric_not_ready"
        assert time.monotonic() - begun_s < 15, "the reading waited for CUDA"
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        assert opener_classifier.OWN_COMMAND in command, "no worker takes it for a user's"
    until(lambda: not alive(pid), "it ends with the probe")


def test_while_a_question_hangs_that_no_signal_ends_no_other_is_asked_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[subprocess.Popen[bytes]] = []

    def hangs(environ: Mapping[str, str]) -> list[str]:
        questions.append(subprocess.Popen(["sleep", "60"]))
        raise libcuda.CudaTimeout("it did not answer", questions[-1])

    monkeypatch.setattr(cuda_init_check, "ask", hangs)
    starts = cuda_init_check.CudaInitCheck(0.0)
    try:
        until(lambda: starts.starts_on("GPU-1", "in_progress") is False, "it was asked")
        for _ in range(20):
            starts.starts_on("GPU-1", "in_progress")
        until(lambda: starts.starts_on("GPU-2", "in_progress") is False, "another GPU is asked of meanwhile")
        assert len(questions) == 2
        questions[0].kill()
        questions[0].wait()
        until(lambda: starts.starts_on("GPU-1", "in_progress") is False and len(questions) == 3, "it has ended")
    finally:
        for one in questions:
            one.kill()
            one.wait()


def asked(cuda: Cuda) -> list[str]:
    """The processes that have initialized CUDA."""
    return [line.split()[1] for line in cuda.calls.read_text().splitlines()] if cuda.calls.exists() else []


def alive(pid: str) -> bool:
    return ProcessId.of(int(pid)) is not None


def test_one_idle_context_of_a_process_that_is_hidden_shows_beside_the_gpus_own_idle_memory(tmp_path: Path) -> None:
    library = Driver(tmp_path)

    def hidden(probe: ProbeProcess, used_mib: int) -> bool:
        library.says(("idle", 0, 1), ("used_mib", 0, used_mib))
        return probe.read().gpus[1].hidden_use

    with library.probe(within=CONTAINER) as probe:
        assert hidden(probe, 60), "a process is there at the first reading already"
        assert not hidden(probe, 30)
        assert [hidden(probe, used) for used in (3, 19, 20, 30, 520)] == [False, False, True, True, True]
    with library.probe(within=CONTAINER, least_bytes={WHOLE.uuid: 3 * MIB}) as probe:
        assert hidden(probe, 30), "what the probe before this one saw is forgotten"
    with library.probe(within=CONTAINER, idle_bytes=700 * MIB) as probe:
        assert [hidden(probe, used) for used in (30, 700, 701)] == [False, False, True], "a screen has so much"


def test_memory_that_no_listed_process_has_is_someone_elses_where_others_are_hidden(tmp_path: Path) -> None:
    """A listed desktop process or MPS server does not make a GPU foreign; a hidden process beside it does."""
    library = Driver(tmp_path)
    for within, hidden in (((), False), (CONTAINER, True)):
        library.says(("used_mib", 0, 60_000))
        with library.probe(within=within) as probe:
            gpu = probe.read().gpus[1]
            assert len(gpu.processes) == 3
            assert gpu.hidden_use is hidden


@pytest.mark.parametrize(
    ("listed", "used_mib", "utilization_ratio", "hidden"),
    [
        ((), 0, 0.0, False),
        ((), 0, None, False),
        ((), 0, 0.1, True),
        ((Process(pid=7, memory_bytes=0),), 0, 0.1, False),
        ((Process(pid=7, lease_id="mine"),), 500, 0.1, False),
        ((Process(pid=7),), 500, 0.1, True),
    ],
)
def test_a_listed_process_of_a_lease_accounts_for_all_use_and_no_process_for_none(
    listed: tuple[Process, ...], used_mib: int, utilization_ratio: float | None, hidden: bool
) -> None:
    assert nvml_reader._has_hidden_use(listed, used_mib * MIB, 16 * MIB, utilization_ratio) is hidden


@pytest.mark.parametrize(
    ("code", "prelude"), [(NOT_SUPPORTED, ""), (UNKNOWN, ON_WSL)], ids=["not supported", "unknown, under WSL2"]
)
def test_where_the_driver_lists_no_processes_on_any_gpu_memory_tells_whether_one_is_in_use(
    tmp_path: Path, code: int, prelude: str
) -> None:
    library = Driver(tmp_path)
    none = [(name, EVERY, code) for name in (LISTS, GRAPHICS, MPS)]
    library.says(*none, ("count", EVERY, 3))
    with library.probe(prelude=prelude) as probe:
        found = {gpu.uuid: (gpu.health, gpu.processes, gpu.hidden_use) for gpu in probe.read().gpus}
        assert found == {
            POOR.uuid: ("ok", (), True),
            WHOLE.uuid: ("ok", (), True),
            THIRD.uuid: ("ok", (), False),
        }
        library.says(*none, ("count", EVERY, 3), ("idle", 0, 1))
        assert [gpu.hidden_use for gpu in probe.read().gpus] == [True, False, False]


def test_the_least_memory_that_was_seen_outlasts_the_probe_that_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Driver(tmp_path)
    for name in ("LD_LIBRARY_PATH", "STAND_IN_NVML"):
        monkeypatch.setenv(name, library.environment[name])
    none = [(name, EVERY, NOT_SUPPORTED) for name in (LISTS, GRAPHICS, MPS)]

    async def story() -> None:
        probe = ProbeClient("n", None, 30.0)
        try:
            seen = []
            for used_mib in (3, 30):
                library.says(*none, ("idle", 0, 1), ("used_mib", 0, used_mib))
                while not (reading := await probe.read(())).gpus:
                    pass
                seen.append(reading.gpus[1].hidden_use)
                await probe._kill()
            assert seen == [False, True]
        finally:
            await probe.close()

    asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.parametrize(
    "tells",
    [
        ((LISTS, 0, NOT_SUPPORTED), (LISTS, 2, NOT_SUPPORTED)),
        ((LISTS, 0, NOT_SUPPORTED), (LISTS, 1, NO_PERMISSION), (LISTS, 2, NOT_SUPPORTED)),
        ((LISTS, 0, NOT_SUPPORTED), (LISTS, 1, UNKNOWN), (LISTS, 2, NOT_SUPPORTED)),
        ((LISTS, 0, NOT_SUPPORTED), ("nvmlDeviceGetUtilizationRates", 1, GPU_IS_LOST), (LISTS, 2, NOT_SUPPORTED)),
    ],
    ids=["another tells", "another may not", "another fails", "another is lost"],
)
def test_one_gpu_alone_that_lists_no_processes_is_one_whose_processes_are_unknown(
    tmp_path: Path, tells: tuple[tuple[str, int, int], ...]
) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3), ("idle", 0, 1), *tells)
    with library.probe() as probe:
        for _ in range(2):
            found = {gpu.uuid: gpu.health for gpu in probe.read().gpus}
            assert (found[WHOLE.uuid], found[THIRD.uuid]) == ("processes_unknown", "processes_unknown")
        # A driver that has told once has lists, whatever becomes of the GPU that told.
        library.says(("count", EVERY, 3), ("idle", 0, 1))
        assert {gpu.health for gpu in probe.read().gpus} == {"ok"}
        library.says(("count", EVERY, 3), ("idle", 0, 1), (LISTS, EVERY, NOT_SUPPORTED))
        assert {gpu.health for gpu in probe.read().gpus} == {"processes_unknown"}


def test_how_long_the_driver_may_take_to_be_opened_is_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Driver(tmp_path)
    library.install(monkeypatch)
    library.says(("nvmlDeviceGetHandleByIndex_v2", EVERY, HANGS))

    async def problem(start_s: float, limited: bool) -> str | None:
        probe = ProbeClient("n", None, 2.0, start_s=start_s)
        try:
            for _ in range(2):
                found = (await probe.read(())).problem
                assert limited or probe.starting, "it is not killed after the 2 s that a reading has"
            library.says()
            while not limited and (found := (await probe.read(())).problem) is not None:
                assert found == STARTING
            return found
        finally:
            await probe.close()

    assert asyncio.run(problem(60.0, limited=False)) is None
    library.says(("nvmlDeviceGetHandleByIndex_v2", EVERY, HANGS))
    assert "it was not ready within 0.7 s" in str(asyncio.run(problem(0.7, limited=True)))


def test_a_call_that_hangs_is_named_and_the_probe_ends(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe(Pace(call_deadline_s=2.0)) as probe:
        probe.read()
        library.says(("nvmlDeviceGetPowerUsage", 0, HANGS))
        reading = probe.read()
        assert reading.over
        assert reading.problem == (
            "nvmlDeviceGetPowerUsage did not answer within 2 s; the GPU driver hangs. See `dmesg` for Xid lines."
        )
        assert probe.process.wait(30) == 3


def test_a_process_is_attributed_to_its_lease(tmp_path: Path) -> None:
    with under("mine") as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has begun")
            held = replace(lease("mine", WHOLE.uuid), user="ann", uid=os.getuid())
            with Driver(tmp_path, f"PID={process.pid}").probe() as probe:
                reading = probe.read((held,))
        finally:
            process.kill()
    seen = reading.gpus[1].processes[0]
    assert (seen.pid, seen.lease_id, seen.command) == (process.pid, "mine", "sleep 60")
    assert seen.user is not None


def looked_at(reading: Reading) -> Reading | None:
    """A reading whose first GPU was looked for in open files."""
    return None if reading.gpus[0].opened_by is None else reading


@pytest.mark.parametrize("state", [LeaseState.ENDED, LeaseState.ACTIVE])
def test_who_keeps_the_device_open_is_looked_for_while_its_lease_drains(tmp_path: Path, state: LeaseState) -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    device = tmp_path / "nvidia1"
    device.touch()
    asked = (lease(mine, POOR.uuid, state=state),)
    library = Driver(tmp_path)
    library.environment["GPULEASE_DEVICE_FILES"] = str(tmp_path / "nvidia")
    with under(mine, "sh", "-c", f"exec 3< {device}; exec sleep 60") as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has begun")
            with library.probe() as probe:
                # One that is asked for as fresh does not wait for the look; the next one does, though not forever.
                whole, later = probe.read(asked), probe.read(asked, complete=False)
                if state is LeaseState.ENDED and later.gpus[0].opened_by is None:
                    later = until(lambda: looked_at(probe.read(asked, complete=False)), "it was looked for")
                readings = (later,) if state is LeaseState.ENDED else (whole, later)
        finally:
            process.kill()
    for reading in readings:
        openers = reading.gpus[0].opened_by
        if state is LeaseState.ACTIVE:
            assert openers is None, "looked for open files although nothing drains"
        else:
            assert [(one.pid, one.lease_id) for one in openers or ()] == [(process.pid, mine)]
        assert reading.gpus[1] == WHOLE


def test_who_was_looked_for_before_readings_failed_says_nothing_when_they_come_again(tmp_path: Path) -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    device = tmp_path / "nvidia1"
    device.touch()
    asked = (lease(mine, POOR.uuid, state=LeaseState.ENDED),)
    library = Driver(tmp_path)
    library.environment["GPULEASE_DEVICE_FILES"] = str(tmp_path / "nvidia")
    with library.probe() as probe:
        probe.read(asked)  # a look at open files has begun, and may have ended
        library.says(("nvmlDeviceGetTemperature", 0, UNINITIALIZED))
        assert probe.read(asked).problem is not None
        with under(mine, "sh", "-c", f"exec 3< {device}; exec sleep 60") as process:
            try:
                until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has begun")
                assert probe.read(asked).problem is not None
                library.says()
                first = probe.read(asked).gpus[0].opened_by
                later = (
                    until(lambda: looked_at(probe.read(asked, complete=False)), "it was looked for").gpus[0].opened_by
                )
            finally:
                process.kill()
    assert first != (), "there was no scan since"
    assert [one.pid for one in later or ()] == [process.pid]


def test_gpus_on_one_nvlink_are_linked(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    links = library.read().links
    assert GpuLink(first=WHOLE.uuid, second=THIRD.uuid, path="nvlink", peer_to_peer=True, nvlinks=2) in links
    assert len(links) == 3


@pytest.mark.parametrize(
    "matter",
    [
        pytest.param(("switched", -1, 1), id="behind an NVSwitch"),
        pytest.param(("nvmlDeviceGetNvLinkState", EVERY, NOT_SUPPORTED), id="a driver that does not count them"),
        pytest.param(
            ("nvmlDeviceGetNvLinkRemotePciInfo_v2", EVERY, NOT_SUPPORTED), id="one that hides where they lead"
        ),
        pytest.param(("nvmlDeviceGetNvLinkState", 0, 15), id="a GPU that is lost while they are counted"),
    ],
)
def test_nvlinks_that_cannot_be_counted_are_nvlinks(tmp_path: Path, matter: tuple[str, int, int]) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3), matter)
    links = library.read().links
    assert GpuLink(first=WHOLE.uuid, second=THIRD.uuid, path="nvlink", peer_to_peer=True) in links


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            DRIVER_NOT_LOADED,
            "NVML does not answer: Driver Not Loaded. Install the NVIDIA driver, or try without GPUs: --simulate 4.",
        ),
        (
            MISMATCH,
            "The NVIDIA driver was changed under the running system (RM has detected an NVML/RM version mismatch.). "
            "Reboot, or unload and load the NVIDIA kernel modules.",
        ),
    ],
)
def test_a_library_that_does_not_start_is_the_problem_until_it_does(tmp_path: Path, code: int, expected: str) -> None:
    library = Driver(tmp_path)
    library.says(("nvmlInitWithFlags", EVERY, code))
    with library.probe() as probe:
        assert probe.read() == Reading(problem=expected)
        library.says()
        assert probe.read().gpus == (POOR, WHOLE)


def test_a_driver_that_goes_away_under_the_probe_is_the_problem_until_it_is_back(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    with library.probe() as probe:
        probe.read()
        library.says(("nvmlDeviceGetTemperature", 0, UNINITIALIZED))
        assert "NVML does not answer" in (probe.read().problem or "")
        library.says()
        assert probe.read(complete=False) == Reading(gpus=(POOR, WHOLE), links=LINKS, driver_version=VERSION)


def test_a_host_without_a_driver_says_what_to_do(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    assert library.read().problem == (
        "NVML does not answer: NVML Shared Library Not Found. "
        "Install the NVIDIA driver, or try without GPUs: --simulate 4."
    )


def test_a_driver_that_is_upgraded_under_a_running_probe_grants_no_more(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    library = Driver(tmp_path, library="libnvidia-ml.so.580.95.05")
    library.says(("driver", EVERY, "580.95.05"))
    module = tmp_path / "version"
    module.write_text(MODULE.format("580.95.05"))
    prelude = f"{SET_IN_DRIVER_CHECK}MODULE_VERSION = Path({str(module)!r})"
    with library.probe(prelude=prelude) as probe:
        assert probe.read().gpus == (POOR, WHOLE)
        Driver(tmp_path, library="libnvidia-ml.so.590.10")
        (tmp_path / "new").symlink_to("libnvidia-ml.so.590.10")
        (tmp_path / "new").rename(tmp_path / "libnvidia-ml.so.1")
        reading = probe.read()
        assert reading.problem == (
            "The NVIDIA driver was changed under the running system: the kernel module is 580.95.05, the library "
            "590.10, so no new program can use CUDA. Reboot, or unload and load the NVIDIA kernel modules."
        )
        assert reading.over, "another process would load the new library"
    module.write_text(MODULE.format("590.10"))
    library.says(("driver", EVERY, "590.10"))
    assert library.read(prelude=prelude).gpus == (POOR, WHOLE), "the module was reloaded"


def test_the_stand_in_fits_the_kernel_module_of_a_host_with_a_driver(tmp_path: Path) -> None:
    """Otherwise no test of this library would pass on a host with GPUs."""
    (tmp_path / "proc" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "nvidia" / "version").write_text(MODULE.format("610.1.7"))
    mounted = 'mount --bind "$0" /proc/driver && exec "$@"'
    with Driver(tmp_path).probe(within=(*AS_ROOT, "--mount", "sh", "-c", mounted, str(tmp_path / "proc"))) as probe:
        assert probe.read() == Reading(gpus=(POOR, WHOLE), links=LINKS, driver_version="610.1.7")


def test_a_binding_that_does_not_fit_the_library_is_the_problem(tmp_path: Path) -> None:
    prelude = (
        "import pynvml; from gpulease_worker.probe import nvml_binding; "
        "nvml_binding.pynvml.nvmlInit = pynvml.throwOnVersionMismatch(lambda: pynvml._nvmlCheckReturn(13))"
    )
    problem = Driver(tmp_path).read(prelude=prelude).problem or ""
    assert problem.startswith("NVML does not answer: nvidia-ml-py does not fit this driver's library: Unversioned")


@pytest.mark.parametrize(
    ("code", "deadline_s", "expected"),
    [
        (0, 30.0, None),
        (DRIVER_NOT_LOADED, 30.0, "Driver Not Loaded"),
        (HANGS, 1.0, "did not answer within 1 s: the driver hangs"),
    ],
)
def test_whether_a_host_has_gpus_is_found_out_within_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, deadline_s: float, expected: str | None
) -> None:
    library = Driver(tmp_path)
    library.says(("nvmlInitWithFlags", EVERY, code))
    library.install(monkeypatch)
    found = nvml_check.unavailable_reason(deadline_s)
    assert (found is None) if expected is None else (found is not None and expected in found)
