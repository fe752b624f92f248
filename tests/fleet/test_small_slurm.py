"""`gpulease fleet slurm` from `up` to `down`, with a daemon, real workers, and a Slurm of one program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from tests.daemon import daemon, eventually
from tests.fleet import small_slurm
from tests.fleet.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with daemon(tmp_path, "--no-worker") as running:
        made = Fleet(running, tmp_path, small_slurm.install(tmp_path / "slurm"), "--gres", "gpu:2", "--time", "1h")
        yield made
        for job in (tmp_path / "slurm/jobs").iterdir():
            subprocess.run(["scancel", job.name], env=made.variables, check=False)


@pytest.mark.budget(30)
def test_a_pool_from_up_to_down(fleet: Fleet) -> None:
    with fleet.up("--nodes", "1") as keeper:
        eventually(lambda: fleet.ready() == ["n1"], 120, fleet.running.story)
        node = fleet.nodes()["n1"]
        assert node["gpu_count"] == 2, "of eight GPUs it shows those of its allocation"
        assert node["available_until"] is not None
        assert "UNTIL" in fleet.running.gpulease("node", "list").stdout
        job = fleet.running.submit("sh", "-c", "env; sleep 600", gpus=2, launcher="plain")
        fleet.running.wait_job(job, "running")
        eventually(lambda: "CUDA_VISIBLE_DEVICES" in fleet.running.job_log(job), 30, fleet.running.story)
        assert "SLURM" not in fleet.running.job_log(job)
        too_long = fleet.running.submit("true", gpus=1, launcher="plain", timeout_s=7200)
        sentence = fleet.running.gpulease("explain", too_long).stdout
        assert "Node n1 goes at" in sentence
        assert "and this may take 120 min" in sentence or "and this may take 2 h" in sentence
        eventually(lambda: fleet.pilots()[0]["was_ready"] is True, 30, fleet.running.story)
        keeper.kill()
        keeper.wait()
    shown = fleet.running.gpulease("fleet", "slurm", "status", **fleet.variables)
    assert "pool main: 1 node, up" in shown.stdout
    down = fleet.running.gpulease("fleet", "slurm", "down", "--tick", "1s", **fleet.variables)
    assert down.returncode == 0, down.stderr
    assert fleet.nodes() == {}
    assert [pilot["state"] for pilot in fleet.pilots()] == ["gone"]
    ended = fleet.running.job(job)
    assert ended["state"] == "queued"
    assert ended["attempt_history"][0]["node_left"] is True
    tokens = fleet.running.call("GET", "/v1/tokens").json["items"]
    assert tokens == [], "its token is refused from now on"


@pytest.mark.budget(30)
def test_scancel_of_a_pilot_lets_its_job_go_on_in_the_next_one(fleet: Fleet) -> None:
    with fleet.up("--nodes", "1"):
        eventually(lambda: fleet.ready() == ["n1"], 120, fleet.running.story)
        job = fleet.running.submit("sleep", "600", gpus=1, launcher="plain")
        fleet.running.wait_job(job, "running")
        subprocess.run(["scancel", "1"], env=fleet.variables, check=True)
        eventually(lambda: fleet.ready() == ["n2"], 120, fleet.running.story)
        assert fleet.running.wait_job(job, "running")["gpus"][0]["node"] == "n2"
        assert fleet.running.job(job)["attempt_history"][0]["node_left"] is True
    assert fleet.type("down", "--tick", "1s").returncode == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_starts_again_and_finds_its_job(fleet: Fleet) -> None:
    with fleet.up("--nodes", "1"):
        eventually(lambda: fleet.ready() == ["n1"], 120, fleet.running.story)
        job = fleet.running.submit("sleep", "600", gpus=1, launcher="plain")
        fleet.running.wait_job(job, "running")
        script = int((fleet.place / "slurm/jobs/1/pid").read_text())
        worker = int(Path(f"/proc/{script}/task/{script}/children").read_text().split()[0])
        killed = ProcessId.of(worker)
        subprocess.run(["kill", "-9", str(worker)], check=True)
        eventually(lambda: killed is None or not killed.alive(), 60)
        eventually(lambda: "start 1 of 10" in (fleet.place / "slurm/jobs/1/output").read_text(), 30)
        eventually(lambda: fleet.ready() == ["n1"], 120, fleet.running.story)
        assert fleet.running.job(job)["state"] == "running"
        assert fleet.running.job(job)["attempts"] == 1
    assert fleet.type("down", "--tick", "1s").returncode == 0


def test_a_pool_that_slurm_refuses_pauses_and_says_why(fleet: Fleet) -> None:
    (fleet.place / "slurm/refuse").touch()
    refused = fleet.type("up", *fleet.options, "--nodes", "1")
    assert refused.returncode == 1
    assert "sbatch --test-only refuses a pilot with --gres=gpu:2 --time=01:00:00" in refused.stdout
    assert "Invalid partition name" in refused.stdout
    for _ in range(2):
        assert fleet.type("up", *fleet.options, "--nodes", "1", "--no-doctor", "--once").returncode == 0
    pilots = fleet.pilots()
    assert "Invalid partition name specified" in str(pilots[0]["why"])
    assert fleet.running.call("GET", "/v1/tokens").json["items"] == [] or pilots[0]["state"] == "ended"


def test_doctor_refuses_a_cluster_on_which_jobs_outlive_their_pilot(tmp_path: Path) -> None:
    variables = small_slurm.install(tmp_path / "slurm", "proctrack/linuxproc")
    command = [sys.executable, "-m", "gpulease_cli", "fleet", "slurm", "doctor", "--gres", "gpu:8"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "BAD  ProctrackType=proctrack/linuxproc: jobs outlive their pilot" in done.stdout
    assert "Set ProctrackType=proctrack/cgroup in slurm.conf" in done.stdout
    assert "ok   sbatch --test-only" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pool", "A b", "--nodes", "1"), "--pool: must be lower-case"),
        ((), "Say how many nodes"),
        (("--nodes", "1", "--max", "2"), "leave it out with --min and --max"),
        (("--min", "3", "--max", "2"), "--min: must be at most --max"),
        (("--nodes", "1", "--sbatch", "-p gpu"), "each must begin with --"),
        (("--nodes", "1", "--sbatch=--arr=0-9"), "--arr=0-9 is not for pilots"),
        (("--nodes", "1", "--sbatch=--clusters=all"), "--clusters=all is not for pilots"),
        (("--nodes", "1", "--worker-url", "unix:///run/x"), "Name an address that the nodes reach"),
        (("--nodes", "1", "--worker-url", "http://192.0.2.1:8750"), "plain HTTP to another host"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    variables = small_slurm.install(tmp_path / "slurm") | {"HOME": str(tmp_path), "GPULEASE_URL": "http://127.0.0.1:1"}
    command = [sys.executable, "-m", "gpulease_cli", "fleet", "slurm", "up", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
