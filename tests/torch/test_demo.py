"""`make demo`, and that its claim can fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from gpulease_protocol.model import Event
from tests.driver.machine import UUIDS, driver_machine

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch"), pytest.mark.timeout(300)]

AS_WITH_CUDA = """
import ctypes, json, os, time
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
context, handle = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(os.environ["LOCAL_RANK"])) == 0
assert nvml.nvmlInit_v2() == 0
for gpu in range(8):
    assert nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(handle)) == 0
time.sleep(2)  # the training, which another test shows
view = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"]), "test_accuracy": 1.0}
names = {"cuda_visible_devices": "CUDA_VISIBLE_DEVICES", "lease_id": "GPULEASE_LEASE_ID"}
print(json.dumps(view | {name: os.environ[variable] for name, variable in names.items()}), flush=True)
"""
"""A training that has a context on its own GPU and the device files of all open, as with CUDA and NCCL."""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpulease_demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the demonstration makes its directory; short, because a Unix socket's path is."""
    with tempfile.TemporaryDirectory(prefix="gp-") as directory:
        yield Path(directory)


def run(script: Path, *options: str, scratch: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    return subprocess.run(
        [sys.executable, str(script), *options],
        env=environment | {"TMPDIR": str(scratch), "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def history(*lines: str) -> list[Event]:
    """`a granted 0 1` for lease a and GPUs 0 and 1; a grant's GPUs need not be repeated at its end."""
    at, events = datetime.now(UTC), []
    for seq, (lease, verb, *gpus) in enumerate((line.split() for line in lines), start=1):
        events.append(Event(seq=seq, at=at, kind=f"lease.{verb}", cause="c", lease_id=lease, gpus=tuple(gpus)))
    return events


@pytest.mark.parametrize(
    ("events", "claims"),
    [
        pytest.param(("a granted 0 1", "b granted 2 3"), 0, id="two leases, no GPU in common"),
        pytest.param(("a granted 0 1", "a ended", "b granted 0 1"), 0, id="one after the other"),
        pytest.param(("a granted 0 1", "b granted 1 2"), 1, id="one GPU in two leases"),
        pytest.param(("a granted 0 1", "b granted 0 1"), 2, id="both GPUs in two leases"),
        pytest.param(("a granted 0", "a ended", "a revived 0", "b granted 0"), 1, id="a revived lease holds again"),
        pytest.param(("a granted 0", "b queued", "b ended", "c granted 0"), 1, id="another's end frees nothing"),
    ],
)
def test_a_gpu_in_two_leases_is_found_in_the_event_log(demo: ModuleType, events: tuple[str, ...], claims: int) -> None:
    assert len(demo.overlaps(history(*events))) == claims


def test_three_trainings_share_four_gpus(scratch: Path) -> None:
    ran = run(EXAMPLES / "demo.py", "--simulate", "4", scratch=scratch)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "waits: digits-3" in ran.stdout
    assert ran.stdout.rstrip().endswith("no GPU was ever in two leases")
    assert list(scratch.glob("gpulease-demo-*")) == [], "the temporary directory is removed"


def test_on_a_driver_the_trainings_share_gpus_with_another_user(tmp_path: Path, scratch: Path) -> None:
    """torch is a build without CUDA here, so each rank does for itself what CUDA and NCCL would do to the driver."""
    shutil.copy(EXAMPLES / "demo.py", tmp_path)
    (tmp_path / "ddp_digits.py").write_text(AS_WITH_CUDA)
    with driver_machine() as machine:
        stranger = machine.start("-n", env={"CUDA_VISIBLE_DEVICES": ",".join(UUIDS[4:])})

        ran = run(tmp_path / "demo.py", scratch=scratch, **machine.environment)

        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "GPU 4, 5, 6, 7: foreign" in ran.stdout
        assert "waits: digits-3" in ran.stdout
        assert ran.stdout.rstrip().endswith("no GPU was ever in two leases")
        assert machine.violations() == []
        contexts = [entry for entry in machine.ended if entry.gpu is not None and entry.pid != stranger.pid]
        assert len(contexts) == len({entry.pid for entry in contexts}) == 6
        assert {entry.gpu for entry in contexts} <= {0, 1, 2, 3}
        assert len({entry.lease_id for entry in contexts}) == 3


def test_a_failing_training_fails_the_demo_and_leaves_no_process(tmp_path: Path, scratch: Path) -> None:
    shutil.copy(EXAMPLES / "demo.py", tmp_path)
    (tmp_path / "ddp_digits.py").write_text("import sys; sys.exit(3)\n")

    ran = run(tmp_path / "demo.py", "--simulate", "4", scratch=scratch)

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "digits-1 failed with exit code" in ran.stdout
    (left,) = scratch.glob("gpulease-demo-*")
    assert f"logs included, is in {left}" in ran.stdout
    assert [process for process in psutil.process_iter(["cmdline"]) if str(left) in str(process.info["cmdline"])] == []
