"""From the end of a lease to the next grant, with real processes: what is left behind, who has it open, who ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulease import Client
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.processes import procfs
from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, daemon, events, eventually

STUBBORN = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
)
"""A process that writes its pid into a file and does not end on SIGTERM."""


OPTIONS = ("--simulate", "1")


@pytest.fixture(scope="module")
def listing_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Hardware]]:
    """A daemon on one GPU whose processes a test chooses, with managed compute modes."""
    place = tmp_path_factory.mktemp("listing")
    hardware = Hardware(place / "hardware.json")
    hardware.show({})
    with daemon(place, "--simulate", str(hardware.path), "--manage-compute-mode") as started:
        yield started, hardware


@pytest.fixture
def listing(listing_daemon: tuple[DaemonProcess, Hardware]) -> tuple[DaemonProcess, Hardware]:
    """This daemon with its GPU free."""
    running, hardware = listing_daemon
    hardware.show({})
    running.give_everything_back()
    return running, hardware


def processes(*pids: int) -> dict[str, Any]:
    """A GPU on which the driver lists these."""
    return {"processes": [{"pid": pid, "memory_bytes": 2**30} for pid in pids]}


def gpu(running: DaemonProcess) -> dict[str, Any]:
    (found,) = running.call("GET", "/v1/gpus").json["items"]
    return dict(found)


def last_event(running: DaemonProcess) -> int:
    """The number of the event that came last."""
    return max((event["seq"] for event in events(running)), default=0)


def written(path: Path) -> int:
    """The pid that a process wrote."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), 60)
    return int(path.read_text())


def leaving(note: Path, gate: Path) -> list[str]:
    """A job whose rank leaves a child in a session of its own and ends when that child is up and there is a gate."""
    script = f'setsid {sys.executable} -c "$CODE" {note} & until [ -s {note} -a -e {gate} ]; do sleep 0.02; done'
    return ["sh", "-c", script]


def submit(running: DaemonProcess, note: Path, gate: Path) -> dict[str, Any]:
    body = {"command": leaving(note, gate), "launcher": "plain", "environment": {"CODE": STUBBORN}}
    answer = running.call("POST", "/v1/jobs", body)
    assert answer.status == 201, answer.content
    return dict(answer.json)


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a user's own, ended at the close."""
    with subprocess.Popen(command, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_child_that_a_rank_leaves_behind_is_ended_before_the_gpu_goes_to_the_next(
    running: DaemonProcess, tmp_path: Path
) -> None:
    note, gate = tmp_path / "child", tmp_path / "gate"
    job = submit(running, note, gate)
    waiting = running.request_lease()
    assert waiting["state"] == "queued"
    child = ProcessId.of(written(note))
    assert child is not None
    gate.touch()
    while child.alive():
        assert running.lease(waiting["id"])["state"] == "queued" or not child.alive(), "granted while the child lives"
        assert gpu(running)["state"] != "free" or not child.alive()
        time.sleep(0.01)
    eventually(lambda: running.lease(waiting["id"])["state"] == "active", 60, running.story)
    assert running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "succeeded"


def test_a_child_that_its_supervisor_could_not_end_keeps_the_gpu_draining_until_the_worker_has_ended_it(
    running: DaemonProcess, tmp_path: Path
) -> None:
    note, gate = tmp_path / "child", tmp_path / "gate"
    before = last_event(running)
    job = submit(running, note, gate)
    waiting = running.request_lease()
    child = ProcessId.of(written(note))
    assert child is not None
    eventually(lambda: running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "running", 60)
    # The machine's worst day: daemon, worker and supervisor die, and the job's record is lost.
    running.kill()
    worker_is_gone(running)
    for pid in process_tree.all_pids():
        command_line = procfs.command_of(pid) or ""
        if f"/jobs/{job['id']}" in command_line and "gpulease_worker.jobs.supervisor" in command_line:
            os.kill(pid, signal.SIGKILL)
    (running.data_dir / "worker" / "jobs" / job["id"]).rename(tmp_path / "lost")
    running.start()

    seen: list[tuple[dict[str, Any], bool]] = []

    def named() -> bool:
        seen.append((gpu(running), child.alive()))
        return f"pid {child.pid}" in (seen[-1][0]["reason"] or "") or not seen[-1][1]

    eventually(named, 60, running.story)
    assert seen[-1][1], "it was ended without any grace"
    assert seen[-1][0]["state"] == "draining"
    running.wait_job(job["id"], "lost")
    while child.alive():
        assert running.lease(waiting["id"])["state"] == "queued" or not child.alive(), "granted while the child lives"
        time.sleep(0.01)
    eventually(lambda: running.lease(waiting["id"])["state"] == "active", 60, running.story)
    kinds = [event["kind"] for event in events(running, after=before)]
    assert kinds.index("gpu.leftover") < kinds.index("gpu.clean") < len(kinds) - kinds[::-1].index("lease.granted")
    gate.touch()


def worker_is_gone(running: DaemonProcess) -> None:
    """Wait until the worker has ended with its daemon."""
    place = str(running.data_dir / "worker")
    eventually(
        lambda: (
            not any(
                "gpulease_cli worker" in (command := procfs.command_of(pid) or "") and place in command
                for pid in process_tree.all_pids()
            )
        ),
        60,
    )


def test_what_a_user_left_is_named_and_let_live(running: DaemonProcess) -> None:
    before = last_event(running)
    held = running.request_lease(wait_s=60)
    with started("sleep", "600", **held["env"]) as mine:
        eventually(lambda: gpu(running)["activity"] in ("active", "idle"), 30)
        running.release(held)
        waiting = running.request_lease()

        def leftovers() -> list[dict[str, Any]]:
            return [event for event in events(running, after=before) if event["kind"] == "gpu.leftover"]

        eventually(lambda: bool(leftovers()), 30, running.story)
        (event,) = leftovers()
        assert f"pid {mine.pid} of " in event["reason"]
        assert "(sleep 600)" in event["reason"]
        assert event["lease_id"] == held["id"]
        assert gpu(running)["state"] == "draining"
        assert mine.poll() is None, "a user's process was ended"
    eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30)


def test_what_a_user_left_is_ended_where_the_administrator_wants_that(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1", "--kill-leftovers") as running:
        held = running.request_lease(wait_s=60)
        with started("sleep", "600", **held["env"]) as mine, started("sleep", "600") as stranger:
            eventually(lambda: gpu(running)["activity"] in ("active", "idle"), 30)
            running.release(held)
            waiting = running.request_lease()
            assert mine.wait(60) == -signal.SIGTERM
            eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30)
            assert stranger.poll() is None


@contextmanager
def opening(note: Path, *devices: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a user's own that has device files open, as CUDA and NVML have those of all GPUs."""
    opens = " ".join(f"exec {3 + place}<{path};" for place, path in enumerate(devices))
    with started("sh", "-c", f"{opens} echo $$ > {note}; exec sleep 600", **environment) as process:
        written(note)
        yield process


@pytest.fixture
def devices(tmp_path: Path) -> tuple[Path, Path]:
    """The device files of a node of two GPUs."""
    paths = tmp_path / "nvidia0", tmp_path / "nvidia1"
    for path in paths:
        path.touch()
    return paths


def known_to_its_worker(running: DaemonProcess, held: dict[str, Any]) -> None:
    """What is started from here on was started during the lease."""
    path = running.data_dir / "worker" / "leases.json"
    eventually(lambda: path.exists() and held["id"] in path.read_text(), 30)


def test_a_process_that_gave_its_gpus_back_may_find_them_again_at_once(tmp_path: Path) -> None:
    """As a notebook does, and without a wait: they drain for as long as a reading takes."""
    again = "import gpulease as g; print([(g.find_usable_cuda_devices(2), len(g.release()))[0] for _ in range(5)])"
    with daemon(tmp_path, "--simulate", "2") as running:
        environment = os.environ | {"GPULEASE_URL": running.url}
        ran = subprocess.run(
            [sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=False
        )
    assert ran.stdout.strip() == str([[0, 1]] * 5), ran.stderr


def test_a_gpu_drains_while_what_its_lease_left_has_its_device_file_open(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    """One that the driver does not list, that has no marker, and whose parent has died: as a forked worker does."""
    options = ("--simulate", "1", "--monitor-name", "my-monitor", "--retained-memory-s", "0.5")
    with daemon(tmp_path, *options, GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        holder = tmp_path / "holder"
        opens = f"exec 3<{devices[0]}; echo $$ > {holder}; (exec sleep 600) & exec sleep 600"
        with started("setsid", "sh", "-c", opens) as owner:
            written(holder)
            known = ProcessId.of(owner.pid)
            assert known is not None
            owned = {"owner_pid": known.pid, "owner_start_ticks": known.start_ticks}
            held = dict(running.call("POST", "/v1/leases?wait_s=60", {"count": 1} | owned).json)
            known_to_its_worker(running, held)
            eventually(lambda: bool(process_tree.descendants(owner.pid)), 30)
            (child,) = process_tree.descendants(owner.pid)
            watching = f"exec 3<{devices[0]}; exec -a my-monitor sleep 600"
            with started("bash", "-c", watching):
                owner.kill()
                waiting = running.request_lease()
                words = f"its device file is kept open by pid {child.pid}"
                eventually(lambda: words in (gpu(running)["reason"] or ""), 30, running.story)
                assert gpu(running)["state"] == "draining"
                shown = [one for one in gpu(running)["opened_by"] if not one["bystander"]]
                assert [(one["pid"], one["lease_id"]) for one in shown] == [(child.pid, held["id"])]
                eventually(lambda: any(event["kind"] == "gpu.leftover" for event in events(running)), 30, running.story)
                assert running.lease(waiting["id"])["state"] == "queued"
                os.kill(child.pid, signal.SIGKILL)
                eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30, running.story)


def test_a_gpu_drains_while_a_rank_that_is_older_than_its_lease_outlives_its_launcher(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    """A rank in a session of its own, as torchrun's, that has the device file open and is not listed yet."""
    options = ("--simulate", "1", "--retained-memory-s", "0.5")
    with daemon(tmp_path, *options, GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        note, opens = tmp_path / "rank", f"exec 3<{devices[0]}; echo $$ > {tmp_path / 'rank'}; exec sleep 600"
        with started("sh", "-c", f"setsid sh -c '{opens}' & exec sleep 600") as launcher:
            rank, known = written(note), ProcessId.of(launcher.pid)
            assert known is not None
            owned = {"owner_pid": known.pid, "owner_start_ticks": known.start_ticks}
            held = dict(running.call("POST", "/v1/leases?wait_s=60", {"count": 1} | owned).json)
            cache = running.data_dir / "worker" / "leases.json"
            eventually(lambda: cache.exists() and f'"pid": {rank}' in cache.read_text(), 30, running.story)
            launcher.kill()
            waiting = running.request_lease()
            eventually(lambda: any(event["kind"] == "gpu.leftover" for event in events(running)), 60, running.story)
            assert running.lease(waiting["id"])["state"] == "queued"
            shown = [(one["pid"], one["lease_id"]) for one in gpu(running)["opened_by"]]
            assert (gpu(running)["state"], shown) == ("draining", [(rank, held["id"])])
            os.kill(rank, signal.SIGKILL)
            eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30, running.story)


def test_a_gpu_is_clean_at_once_although_a_training_on_another_gpu_has_its_device_file_open(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    with daemon(tmp_path, "--simulate", "2", GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        short, long = running.request_lease(wait_s=60), running.request_lease(wait_s=60)
        known_to_its_worker(running, long)
        with opening(tmp_path / "note", *devices, **long["env"]) as training:
            running.release(short)
            waiting = running.request_lease()
            eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30, running.story)
            (clean,) = [event for event in events(running) if event["kind"] == "gpu.clean"]
            assert clean["lease_id"] == short["id"]
            assert "device file" not in (clean["reason"] or "")
            assert training.poll() is None


@pytest.mark.budget(20)
def test_a_process_of_no_lease_that_has_the_device_file_open_delays_a_gpu_and_is_named(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    options = ("--simulate", "2", "--retained-memory-s", "6")
    with daemon(tmp_path, *options, GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        held = running.request_lease(wait_s=60)
        known_to_its_worker(running, held)
        with opening(tmp_path / "note", *devices) as exporter:
            running.release(held)

            shown: list[str] = []

            def draining() -> list[str]:
                gpus = running.call("GET", "/v1/gpus").json["items"]
                shown[:] = [one["reason"] or "" for one in gpus if one["state"] == "draining"]
                return shown

            said = f"nothing of that lease is left; pid {exporter.pid} of "
            eventually(lambda: any(said in reason for reason in draining()), 30, running.story)
            assert any("which delays it by at most 6 s" in reason for reason in shown)
            eventually(lambda: not draining(), 30, running.story)
            (clean,) = [event for event in events(running) if event["kind"] == "gpu.clean"]
            assert f"device file still open by pid {exporter.pid} of " in clean["reason"]
            assert exporter.poll() is None


@pytest.mark.parametrize("below", [False, True], ids=["it has", "its child has"])
def test_who_waits_for_a_gpu_does_not_delay_it_by_having_its_device_file_open(
    tmp_path: Path, devices: tuple[Path, Path], below: bool
) -> None:
    """A trial that has called `torch.cuda.is_available()`, which opens NVML, while the trial before it held the GPU."""
    options = ("--simulate", "1", "--retained-memory-s", "300")
    with daemon(tmp_path, *options, GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        held = running.request_lease(wait_s=60)
        known_to_its_worker(running, held)
        note = tmp_path / "note"
        opens = f"exec 3<{devices[0]}; echo $$ > {note}; exec sleep 600"
        with started("sh", "-c", f"(setsid sh -c '{opens}') & exec sleep 600" if below else opens) as trial:
            written(note)
            known = ProcessId.of(trial.pid)
            assert known is not None
            owned = {"owner_pid": known.pid, "owner_start_ticks": known.start_ticks}
            waiting = dict(running.call("POST", "/v1/leases", {"count": 1} | owned).json)
            assert waiting["state"] == "queued"
            running.release(held)
            eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30, running.story)


FINDS = """
import gpulease, sys
input()
try:
    gpulease.find_usable_cuda_devices(1)
except gpulease.NotNow as error:
    print(error)
"""


def test_a_process_that_uses_the_gpu_without_a_lease_is_told_that_it_is_in_its_own_way(
    listing: tuple[DaemonProcess, Hardware],
) -> None:
    """As a notebook that has made a context before it asks."""
    running, hardware = listing
    words = [sys.executable, "-c", FINDS]
    environment = os.environ | {"GPULEASE_URL": running.url}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        hardware.show(processes(program.pid))
        eventually(lambda: gpu(running)["state"] == "foreign", 30, running.story)
        said, _ = program.communicate("\n", timeout=60)
    assert f"The devices [0] are in use by this process itself (pid {program.pid}), without a lease." in said
    assert f"`gpulease adopt {program.pid}`" in said
    assert "occupied by other processes" not in said


def test_a_leased_gpu_is_exclusive_where_the_administrator_wants_that(
    listing: tuple[DaemonProcess, Hardware],
) -> None:
    running, _ = listing
    held = running.request_lease(wait_s=60)
    eventually(lambda: gpu(running)["compute_mode"] == "exclusive_process", 30, running.story)
    sentence = running.call("GET", f"/v1/leases/{held['id']}/explain").json["sentence"]
    assert "EXCLUSIVE_PROCESS: one process on each at a time" in sentence
    running.release(held)
    eventually(lambda: gpu(running)["compute_mode"] == "default", 30, running.story)
    eventually(lambda: gpu(running)["state"] == "free", 30, running.story)


def test_a_process_that_belongs_to_no_one_keeps_the_gpu_and_is_in_conflict_with_a_holder(
    listing: tuple[DaemonProcess, Hardware],
) -> None:
    running, hardware = listing
    before = last_event(running)
    with started("sleep", "600") as stranger:
        hardware.show(processes(stranger.pid))
        words = f"In use without a lease by pid {stranger.pid} of "
        eventually(lambda: words in (gpu(running)["reason"] or ""), 30, running.story)
        assert gpu(running)["state"] == "foreign"
        waiting = running.request_lease()
        assert waiting["state"] == "queued"
        hardware.show({})
        eventually(lambda: running.lease(waiting["id"])["state"] == "active", 30, running.story)
        hardware.show(processes(stranger.pid))
        eventually(lambda: gpu(running)["activity"] == "conflict", 30, running.story)
        (problem,) = running.lease(waiting["id"])["problems"]
        assert f"pid {stranger.pid} of " in problem
        assert problem.endswith("(sleep 600), outside this lease.")
        hardware.show({})
        eventually(lambda: running.lease(waiting["id"])["problems"] == [], 30, running.story)
        kinds = [event["kind"] for event in events(running, after=before)]
        assert (kinds.count("gpu.conflict"), kinds.count("gpu.conflict_over")) == (1, 1)


def test_the_process_that_asked_and_its_children_are_the_holders_without_any_marker(
    listing: tuple[DaemonProcess, Hardware],
) -> None:
    running, hardware = listing
    before = last_event(running)
    with Client(running.url) as client, client.lease(ttl_s=60, wait_s=60) as held, started("sleep", "600") as child:
        hardware.show(processes(os.getpid(), child.pid))
        eventually(lambda: len(gpu(running)["processes"]) == 2, 30, running.story)
        eventually(lambda: all(one["lease_id"] == held.id for one in gpu(running)["processes"]), 30, running.story)
        assert running.lease(held.id)["holder"]["owner_pid"] == os.getpid()
        assert not [event for event in events(running, after=before) if event["kind"] == "gpu.conflict"]


def test_a_request_that_does_not_wait_is_granted_as_soon_as_a_stranger_is_gone(
    listing: tuple[DaemonProcess, Hardware],
) -> None:
    """Process lists are read every 5 s, and a refusal that rested on such an old one would be wrong for so long."""
    running, hardware = listing
    hardware.show(processes(3999999))
    eventually(lambda: gpu(running)["state"] == "foreign", 30, running.story)
    asked = {"count": 1, "queue": False}
    refused = running.call("POST", "/v1/leases", asked)
    assert refused.problem() == (409, "not_now")
    hardware.show({})
    eventually(lambda: running.call("POST", "/v1/leases", asked).status == 201, 60, running.story)
