"""Programs that read numbers, under a real daemon: on GPUs of which a lower one is lost, and on simulated ones.

The driver is the stand-in for NVML, and CUDA the stand-in for CUDA, on the same three GPUs. The daemon's index of the
last is 2; CUDA does not count the lost one, and calls it 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease import UnknownOrdinals
from gpulease_protocol.launchers import strip_launcher_variables
from tests.client.stand_in_cuda import HERE, Card, Cuda, machine
from tests.daemon import PATIENT, DaemonProcess, daemon, eventually
from tests.imported_program import completed
from tests.worker.stand_in import EVERY, GPU_IS_LOST, POOR, THIRD, WHOLE, Driver

READS_NUMBERS = f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
import using_cuda
mask = os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps({{"mask": mask, "numbers": [int(entry) for entry in mask.split(",")],
                   "order": os.environ["CUDA_DEVICE_ORDER"], "shown": using_cuda.shown()}}))
"""
FINDS = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import gpulease, using_cuda
numbers = gpulease.find_usable_cuda_devices(1)
print(json.dumps({{"numbers": numbers, "shown": using_cuda.shown()}}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(scope="module")
def cuda(place: Path) -> Cuda:
    cuda = Cuda(place)
    kinds = {POOR.uuid: "g", WHOLE.uuid: "u", THIRD.uuid: "g"}
    cards = [Card(uuid.removeprefix("GPU-").replace("-", ""), 5, kind) for uuid, kind in kinds.items()]
    cuda.environment["STAND_IN_CUDA"] = machine(*cards)
    return cuda


def states(running: DaemonProcess) -> dict[str, tuple[int, str]]:
    """Index and state of each GPU."""
    found = running.call("GET", "/v1/gpus").json["items"]
    return {gpu["uuid"]: (gpu["index"], gpu["state"]) for gpu in found}


@pytest.fixture(scope="module")
def running(place: Path, cuda: Cuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    driver = Driver(place)
    driver.says(("count", EVERY, 3), ("idle", 0, 1))
    paces = {"GPULEASE_PROCESSES_S": "0.05", "GPULEASE_HEALTH_S": "0.5", "GPULEASE_POLL_S": "0.2"}
    data = tmp_path_factory.mktemp("daemon") / "d"
    started = DaemonProcess(data, "--node", "n", environment=PATIENT | driver.environment | paces)
    try:
        started.start()
        eventually(lambda: states(started).get(WHOLE.uuid) == (1, "free"), 60, lambda: str(states(started)))
        driver.says(("count", EVERY, 3), ("idle", 0, 1), ("nvmlDeviceGetHandleByIndex_v2", 0, GPU_IS_LOST))
        eventually(lambda: states(started)[WHOLE.uuid] == (1, "unhealthy"), 60, lambda: str(states(started)))
        yield started
    finally:
        started.stop()


def shells(cuda: Cuda, running: DaemonProcess, **more: str) -> dict[str, str]:
    """The environment of someone's shell, in which an order of GPUs was left."""
    left = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    return cuda.environment | left | {"GPULEASE_URL": running.url} | more


def gpulease(cuda: Cuda, running: DaemonProcess, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return completed(words, shells(cuda, running, **more), 60)


def free(running: DaemonProcess) -> None:
    """Wait until the last GPU, the only one that can be granted, is free."""
    eventually(lambda: states(running)[THIRD.uuid] == (2, "free"), 60, lambda: str(states(running)))


def program(place: Path, name: str) -> str:
    """A script of that name which reads numbers."""
    script = place / name
    script.write_text(f"#!{sys.executable}\n{READS_NUMBERS}")
    script.chmod(0o755)
    return str(script)


RIGHT = {"mask": "1", "numbers": [1], "order": "PCI_BUS_ID", "shown": [THIRD.uuid]}


@pytest.mark.parametrize("asked", [(), ("--mask", "indices")])
def test_what_run_starts_gets_the_number_of_its_own_gpu(running, cuda, place: Path, asked: tuple[str, ...]) -> None:
    free(running)
    words = [program(place, "vllm"), "serve"] if not asked else [sys.executable, "-c", READS_NUMBERS]
    ran = gpulease(cuda, running, "run", *asked, "--", *words)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == RIGHT


def test_what_reads_uuids_gets_uuids(running: DaemonProcess, cuda: Cuda, place: Path) -> None:
    free(running)
    ran = gpulease(cuda, running, "run", "--mask", "uuids", "--", program(place, "vllm"))
    assert ran.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'GPU-" in ran.stderr
    free(running)
    ran = gpulease(cuda, running, "run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert ran.stdout == f"{THIRD.uuid}\n"


@pytest.mark.parametrize("fails", ["802", "dies"])
def test_run_refuses_what_it_cannot_number_and_gives_the_gpu_back(running, cuda, place: Path, fails: str) -> None:
    free(running)
    ran = gpulease(cuda, running, "run", "--mask", "indices", "--", "touch", str(place / "ran"), STAND_IN_FAILS=fails)
    assert ran.returncode == 125
    assert "why: The numbers that CUDA gives these GPUs are not known: CUDA was asked on this host, and " in ran.stderr
    assert "do:  Check CUDA on this host, or use --mask uuids if the program reads UUIDs." in ran.stderr
    assert not (place / "ran").exists()
    assert running.call("GET", "/v1/leases?state=active").json["items"] == []


def submitted(running: DaemonProcess, cuda: Cuda, *words: str) -> tuple[dict[str, Any], str]:
    """A job's end, and what it has printed."""
    sent = gpulease(cuda, running, "submit", "--json", *words)
    assert sent.returncode == 0, sent.stderr
    path = f"/v1/jobs/{json.loads(sent.stdout)['id']}"
    eventually(lambda: running.call("GET", path).json["ended_at"], 60, running.story)
    return running.call("GET", path).json, running.call("GET", f"{path}/logs").content.decode()


def test_a_job_that_starts_vllm_gets_the_number_of_its_own_gpu(running, cuda, place: Path) -> None:
    free(running)
    job, printed = submitted(running, cuda, "--launcher", "plain", "--", program(place, "vllm"), "serve")
    assert job["state"] == "succeeded", (job, printed)
    assert json.loads(printed) == RIGHT


def test_a_lost_gpu_below_moves_no_deepspeed_job_onto_another(running, cuda, place: Path) -> None:
    free(running)
    package = place / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "runner.py").write_text(READS_NUMBERS)
    (place / "t.py").touch()
    job = {
        "command": ["t.py"],
        "launcher": "deepspeed",
        "interpreter": sys.executable,
        "working_directory": str(place),
        "environment": cuda.environment | {"PYTHONPATH": str(place)},
    }
    made = running.call("POST", "/v1/jobs", job)
    assert made.status == 201, made.content
    path = f"/v1/jobs/{made.json['id']}"
    eventually(lambda: running.call("GET", path).json["ended_at"], 60, running.story)
    printed = running.call("GET", f"{path}/logs").content.decode()
    assert running.call("GET", path).json["state"] == "succeeded", (running.call("GET", path).json, printed)
    assert json.loads(printed) == RIGHT


def test_a_mask_of_which_no_one_has_heard_is_refused(running: DaemonProcess) -> None:
    answer = running.call("POST", "/v1/jobs", {"command": ["t.py"], "mask": "names"})
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")


def test_in_a_program_with_numbers_the_finder_gives_its_gpu(running: DaemonProcess, cuda: Cuda) -> None:
    free(running)
    ran = gpulease(cuda, running, "run", "--mask", "indices", "--", sys.executable, "-c", FINDS)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"numbers": [0], "shown": [THIRD.uuid]}


def test_a_lease_in_python_has_numbers_too(running: DaemonProcess, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    free(running)
    for name, value in shells(cuda, running).items():
        monkeypatch.setenv(name, value)
    with running.client() as client, client.lease(wait_s=60) as lease:
        assert lease.environ()["CUDA_VISIBLE_DEVICES"] == THIRD.uuid
        assert lease.environ("indices")["CUDA_VISIBLE_DEVICES"] == "1"
        monkeypatch.setenv("STAND_IN_FAILS", "999")
        with pytest.raises(UnknownOrdinals, match=r'environ\(mask="uuids"\)'):
            lease.environ("indices")


def test_simulated_gpus_have_the_daemons_numbers(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "3") as simulated:
        environment = strip_launcher_variables(os.environ) | {"GPULEASE_URL": simulated.url}
        words = [
            "run",
            "--mask",
            "indices",
            "-n",
            "3",
            "--",
            "sh",
            "-c",
            "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER",
        ]
        ran = completed(words, environment, 60)
        assert ran.stdout == "0,1,2 PCI_BUS_ID\n", ran.stderr
        job = {"command": ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], "launcher": "plain", "mask": "indices", "gpus": 2}
        made = simulated.call("POST", "/v1/jobs", job)
        path = f"/v1/jobs/{made.json['id']}"
        eventually(lambda: simulated.call("GET", path).json["ended_at"], 60, simulated.story)
        assert simulated.call("GET", f"{path}/logs").content.decode().strip() in ("0,1", "0,2", "1,2")
