"""Jobs whose program reads indices: which GPUs it gets, as which user CUDA is asked, and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import Launcher, Mask
from gpulease_protocol.node_protocol import JobOrder
from gpulease_worker.jobs import job_records
from tests.client.stand_in_cuda import Card, Cuda, machine
from tests.worker.build import GPUS, furnished, living, order, python, spec, supervising, until
from tests.worker.strangers import ROOT, STRANGER, end_of, log_of, passable, refused

LEASED = tuple(
    Card(uuid.removeprefix("GPU-").replace("-", ""), speed) for uuid, speed in zip(GPUS, (1, 9), strict=True)
)
DIGITS = [card.digits for card in LEASED]
OTHERS = Card("ee550000000000000000000000000000", speed=5)
"""A GPU that another user has."""
LOST = Card("ff660000000000000000000000000000", kind="u")
READS_NUMBERS = """
import ctypes, json, os
mask = os.environ["CUDA_VISIBLE_DEVICES"]
numbers = [int(entry) for entry in mask.split(",")]
cuda, count, shown = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), []
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for ordinal in range(count.value):
    uuid = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid(uuid, ordinal) == 0
    shown.append(bytes(uuid).hex())
print(json.dumps({"mask": mask, "order": os.environ["CUDA_DEVICE_ORDER"], "uid": os.getuid(),
                  "size": os.environ.get("LOCAL_SIZE"), "shown": shown}))
"""
"""What vLLM and DeepSpeed do first with the mask; then what CUDA makes of it."""
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
"""One that every user can start."""


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        yield directory


@pytest.fixture
def cuda(public: Path) -> Cuda:
    """The stand-in's library, for every user, and a file in which every user's calls are noted."""
    library = Cuda(public)
    library.calls.touch()
    library.calls.chmod(0o666)
    (public / "libcuda.so.1").chmod(0o755)
    return library


def on(cuda: Cuda, *cards: Card, **more: str) -> dict[str, str]:
    """What a job on that machine has in its environment."""
    place = cuda.environment["LD_LIBRARY_PATH"]
    said = {"LD_LIBRARY_PATH": place, "STAND_IN_CALLS": str(cuda.calls), "STAND_IN_CUDA": machine(*cards)}
    return said | more


def vllm(public: Path) -> str:
    """A program of that name, which every user can run."""
    program = public / "vllm"
    program.write_text(f"#!{PYTHON}\n{READS_NUMBERS}")
    program.chmod(0o755)
    return str(program)


def printed(report: Any) -> dict[str, Any]:
    assert report.exit_code == 0, (report.reason, log_of(report))
    said: dict[str, Any] = json.loads(log_of(report).splitlines()[-1])
    return said


@pytest.mark.parametrize(
    ("cards", "mask"),
    [
        ((*LEASED, OTHERS), "0,1"),
        ((OTHERS, *LEASED), "1,2"),
        ((LOST, OTHERS, LEASED[0], OTHERS, LEASED[1]), "1,3"),
    ],
)
@pytest.mark.parametrize("uid", [os.geteuid(), STRANGER])
def test_a_program_that_reads_indices_gets_those_of_its_own_gpus(
    public: Path, cuda: Cuda, uid: int, cards: tuple[Card, ...], mask: str
) -> None:
    """The daemon's indices of these GPUs are 2 and 5, which would be another user's or none at all."""
    environment = on(cuda, *cards)
    report = end_of(public, vllm(public), "serve", "m", uid=uid, interpreter=PYTHON, environment=environment)
    if not ROOT and uid != os.geteuid():
        assert refused(report)
        return
    said = printed(report)
    assert said == {"mask": mask, "order": "PCI_BUS_ID", "uid": uid, "size": None, "shown": DIGITS}


def test_cuda_is_asked_by_processes_of_the_job_that_end_before_it_begins(public: Path, cuda: Cuda) -> None:
    program = public / "vllm"
    program.write_text(
        "#!/bin/sh\ncat $STAND_IN_CALLS; cut -d' ' -f2 $STAND_IN_CALLS | while read p; do ls /proc/$p; done"
    )
    program.chmod(0o755)
    report = end_of(public, str(program), uid=os.geteuid(), interpreter=PYTHON, environment=on(cuda, *LEASED))
    calls = [line for line in log_of(report).splitlines() if line.startswith("cuInit")]
    assert len(calls) == 2
    assert "cmdline" not in log_of(report).split()


def deepspeed(public: Path) -> None:
    """A package of that name that does what its launcher does first."""
    package = public / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "runner.py").write_text(READS_NUMBERS)


def test_a_lost_gpu_shifts_no_deepspeed_job_onto_another_users_gpu(public: Path, cuda: Cuda) -> None:
    deepspeed(public)
    cards = (LOST, OTHERS, LEASED[0], OTHERS, LEASED[1])
    (public / "t.py").touch()
    report = end_of(
        public,
        "t.py",
        uid=os.geteuid(),
        launcher=Launcher.DEEPSPEED,
        interpreter=sys.executable,
        working_directory=str(public),
        environment=on(cuda, *cards, PYTHONPATH=str(public)),
    )
    said = printed(report)
    assert said == {"mask": "1,3", "order": "PCI_BUS_ID", "uid": os.geteuid(), "size": "4", "shown": DIGITS}


def test_a_requested_mask_overrides_the_default_for_the_program(public: Path, cuda: Cuda) -> None:
    environment = on(cuda, *LEASED)
    said = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    report = end_of(public, *said, uid=os.geteuid(), mask=Mask.INDICES, environment=environment)
    assert log_of(report) == "0,1\n"
    program = public / "vllm"
    program.write_text("#!/bin/sh\necho $CUDA_VISIBLE_DEVICES")
    program.chmod(0o755)
    report = end_of(
        public / "again", str(program), uid=os.geteuid(), mask=Mask.UUIDS, environment=on(cuda, STAND_IN_FAILS="999")
    )
    assert log_of(report) == ",".join(GPUS) + "\n"


@pytest.mark.parametrize(
    ("cards", "more", "words"),
    [
        ((LEASED[0], OTHERS), {}, f"CUDA was asked for them, and it does not show {GPUS[1]}, but {GPUS[0]}, "),
        (
            LEASED,
            {"STAND_IN_FAILS": "802"},
            "CUDA was asked for them, and cuInit answers with error 802 (system not ready: ",
        ),
        (LEASED, {"STAND_IN_FAILS": "dies"}, "the driver fell over"),
    ],
)
def test_a_job_with_unknown_indices_does_not_start(
    public: Path, cuda: Cuda, cards: tuple[Card, ...], more: dict[str, str], words: str
) -> None:
    job = end_of(public, vllm(public), uid=os.geteuid(), environment=on(cuda, *cards, **more))
    assert (job.exit_code, log_of(job)) == (None, "")
    assert job.reason is not None
    assert job.reason.startswith("The numbers that CUDA gives these GPUs are not known: ")
    assert words in job.reason
    assert "can be submitted with the mask `uuids`." in job.reason


def test_a_missing_library_or_interpreter_is_the_reason(public: Path, cuda: Cuda) -> None:
    missing = end_of(public, vllm(public), uid=os.geteuid(), interpreter="/no/python", environment=on(cuda, *LEASED))
    assert "The interpreter '/no/python' was not found in " in str(missing.reason)
    cuda.is_missing()
    missing = end_of(public / "again", vllm(public), uid=os.geteuid(), environment=on(cuda, *LEASED))
    assert "CUDA was asked for them, and " in str(missing.reason)
    assert "libcuda.so.1" in str(missing.reason)


@pytest.mark.parametrize(
    ("says", "most"),
    [
        ("fails a\\000b", 800),
        ("%060000d", 1000),
        ("fails %060000d", 1000),
        ("device GPU-%036d\\n" * 900 + "end\\n", 1200),
    ],
    ids=["NUL", "long", "long, as an error", "many devices"],
)
def test_unexpected_output_of_the_interpreter_is_quoted_in_the_reason(
    public: Path, cuda: Cuda, says: str, most: int
) -> None:
    interpreter = public / "python"
    interpreter.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    interpreter.chmod(0o755)
    job = end_of(public, vllm(public), uid=os.geteuid(), interpreter=str(interpreter), environment=on(cuda, *LEASED))
    assert job.exit_code is None
    assert job.reason is not None
    assert job.reason.startswith("The numbers that CUDA gives these GPUs are not known: ")
    assert len(job.reason) <= most
    assert "\0" not in job.reason


def hanging(tmp_path: Path, cuda: Cuda) -> JobOrder:
    environment = on(cuda, *LEASED, STAND_IN_FAILS="hang")
    return order("j", spec("touch", str(tmp_path / "ran"), mask=Mask.INDICES, environment=environment))


def end_in(directory: Path) -> job_records.ExitRecord:
    end = job_records.read(directory, job_records.EXIT, job_records.ExitRecord)
    assert end is not None
    return end


def test_a_hung_driver_is_awaited_for_a_limited_time(tmp_path: Path, cuda: Cuda) -> None:
    directory = furnished(tmp_path / "j", hanging(tmp_path, cuda))
    with supervising(directory, "from gpulease.cuda import index_mask; index_mask.QUERY_TIMEOUT_S = 1.0") as supervisor:
        assert supervisor.wait(60) == 0
    assert "CUDA was asked for them, and it did not answer within 1 s." in str(end_in(directory).reason)
    assert not (tmp_path / "ran").exists()


def test_a_stop_reaches_a_job_while_cuda_is_asked(tmp_path: Path, cuda: Cuda) -> None:
    job = hanging(tmp_path, cuda)
    directory = furnished(tmp_path / "j", job)
    with supervising(directory) as supervisor:
        until(lambda: cuda.calls.read_text().endswith("\n"), "CUDA is asked")
        asking = int(cuda.calls.read_text().split()[1])
        assert asking in living(job.lease_id), "what opens the GPUs carries the lease's marker"
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 0
    assert end_in(directory).reason == "It was stopped before it started."
    assert not (tmp_path / "ran").exists()


def test_a_plan_without_optional_fields_is_read(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec(*python("-c", "raise SystemExit(7)"))))
    plan = json.loads((directory / job_records.ORDER).read_text())
    for name in ("indexed_gpus", "interpreter"):
        del plan[name]
    (directory / job_records.ORDER).write_text(json.dumps(plan))
    with supervising(directory) as supervisor:
        assert supervisor.wait(60) == 0
    assert end_in(directory).exit_code == 7
