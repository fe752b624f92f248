"""From the end of a lease to the next grant, with real processes: what is left behind, who has it open, who ends it."""

from __future__ import annotations

import json
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
from gpulease_worker import processes
from tests.daemon import DaemonProcess, daemon, events, eventually

STUBBORN = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
)
"""A process that writes its pid into a file and does not end on SIGTERM."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon(tmp_path, "--simulate", "1") as started:
        yield started


def gpu(running: DaemonProcess) -> dict[str, Any]:
    (found,) = running.call("GET", "/v1/gpus").json["items"]
    return dict(found)


def lease(running: DaemonProcess, lease_id: str) -> dict[str, Any]:
    return dict(running.call("GET", f"/v1/leases/{lease_id}").json)


def ask(running: DaemonProcess) -> dict[str, Any]:
    answer = running.call("POST", "/v1/leases", {"count": 1})
    assert answer.status in (201, 202), answer.content
    return dict(answer.json)


def release(running: DaemonProcess, held: dict[str, Any]) -> None:
    assert running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]}).status == 200


def written(path: Path) -> int:
    """The pid that a process wrote."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), 30)
    return int(path.read_text())


def leaving(note: Path) -> list[str]:
    """A job whose rank leaves a child in a session of its own and ends as soon as that child is up."""
    script = f'setsid {sys.executable} -c "$CODE" {note} & until [ -s {note} ]; do sleep 0.02; done'
    return ["sh", "-c", script]


def submit(running: DaemonProcess, note: Path) -> dict[str, Any]:
    body = {"command": leaving(note), "launcher": "plain", "environment": {"CODE": STUBBORN}}
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
    note = tmp_path / "child"
    job = submit(running, note)
    waiting = ask(running)
    assert waiting["state"] == "queued"
    child = processes.Identity.of(written(note))
    assert child is not None
    while child.alive():
        assert lease(running, waiting["id"])["state"] == "queued" or not child.alive(), "granted while the child lives"
        assert gpu(running)["state"] != "free" or not child.alive()
        time.sleep(0.01)
    eventually(lambda: lease(running, waiting["id"])["state"] == "active", 20, running.story)
    assert running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "succeeded"


def test_a_child_that_its_supervisor_could_not_end_keeps_the_gpu_draining_until_the_worker_has_ended_it(
    running: DaemonProcess, tmp_path: Path
) -> None:
    note, gate = tmp_path / "child", tmp_path / "gate"
    command = [*leaving(note)[:2], leaving(note)[2] + f"; until [ -e {gate} ]; do sleep 0.02; done"]
    body = {"command": command, "launcher": "plain", "environment": {"CODE": STUBBORN}}
    job = running.call("POST", "/v1/jobs", body).json
    waiting = ask(running)
    child = processes.Identity.of(written(note))
    assert child is not None
    eventually(lambda: running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "running", 20)
    # The machine's worst day: daemon, worker and supervisor die, and the job's record is lost.
    running.kill()
    worker_is_gone(running)
    for pid in processes.pids():
        command_line = processes.command_of(pid) or ""
        if f"/jobs/{job['id']}" in command_line and "gpulease_worker.supervisor" in command_line:
            os.kill(pid, signal.SIGKILL)
    (running.data_dir / "worker" / "jobs" / job["id"]).rename(tmp_path / "lost")
    running.start()

    eventually(lambda: f"pid {child.pid}" in (gpu(running)["reason"] or "") or not child.alive(), 20, running.story)
    assert gpu(running)["state"] == "draining"
    assert child.alive(), "it was ended without any grace"
    assert running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "lost"
    while child.alive():
        assert lease(running, waiting["id"])["state"] == "queued" or not child.alive(), "granted while the child lives"
        time.sleep(0.01)
    eventually(lambda: lease(running, waiting["id"])["state"] == "active", 20, running.story)
    kinds = [event["kind"] for event in events(running)]
    assert kinds.index("gpu.leftover") < kinds.index("gpu.clean") < len(kinds) - kinds[::-1].index("lease.granted")
    gate.touch()


def worker_is_gone(running: DaemonProcess) -> None:
    """Wait until the worker has ended with its daemon."""
    place = str(running.data_dir / "worker")
    eventually(
        lambda: (
            not any(
                "gpulease.cli worker" in (command := processes.command_of(pid) or "") and place in command
                for pid in processes.pids()
            )
        ),
        20,
    )


def test_what_a_user_left_is_named_and_let_live(running: DaemonProcess) -> None:
    held = ask(running)
    with started("sleep", "600", **held["env"]) as mine:
        eventually(lambda: gpu(running)["activity"] in ("active", "idle"), 10)
        release(running, held)
        waiting = ask(running)
        eventually(lambda: any(event["kind"] == "gpu.leftover" for event in events(running)), 10, running.story)
        (event,) = [event for event in events(running) if event["kind"] == "gpu.leftover"]
        assert f"pid {mine.pid} of " in event["reason"]
        assert "(sleep 600)" in event["reason"]
        assert event["lease_id"] == held["id"]
        assert gpu(running)["state"] == "draining"
        assert mine.poll() is None, "a user's process was ended"
    eventually(lambda: lease(running, waiting["id"])["state"] == "active", 10)


def test_what_a_user_left_is_ended_where_the_administrator_wants_that(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1", "--kill-leftovers") as running:
        held = ask(running)
        with started("sleep", "600", **held["env"]) as mine, started("sleep", "600") as stranger:
            eventually(lambda: gpu(running)["activity"] in ("active", "idle"), 10)
            release(running, held)
            waiting = ask(running)
            assert mine.wait(20) == -signal.SIGTERM
            eventually(lambda: lease(running, waiting["id"])["state"] == "active", 10)
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
    eventually(lambda: path.exists() and held["id"] in path.read_text(), 10)


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
            known = processes.Identity.of(owner.pid)
            assert known is not None
            owned = {"owner_pid": known.pid, "owner_start_ticks": known.start_ticks}
            held = dict(running.call("POST", "/v1/leases", {"count": 1} | owned).json)
            known_to_its_worker(running, held)
            eventually(lambda: bool(processes.descendants(owner.pid)), 10)
            (child,) = processes.descendants(owner.pid)
            watching = f"exec 3<{devices[0]}; exec -a my-monitor sleep 600"
            with started("bash", "-c", watching):
                owner.kill()
                waiting = ask(running)
                words = f"its device file is kept open by pid {child.pid}"
                eventually(lambda: words in (gpu(running)["reason"] or ""), 10, running.story)
                assert gpu(running)["state"] == "draining"
                shown = [one for one in gpu(running)["opened_by"] if not one["bystander"]]
                assert [(one["pid"], one["lease_id"]) for one in shown] == [(child.pid, held["id"])]
                eventually(lambda: any(event["kind"] == "gpu.leftover" for event in events(running)), 10, running.story)
                assert lease(running, waiting["id"])["state"] == "queued"
                os.kill(child.pid, signal.SIGKILL)
                eventually(lambda: lease(running, waiting["id"])["state"] == "active", 10, running.story)


def test_a_gpu_is_clean_at_once_although_a_training_on_another_gpu_has_its_device_file_open(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    with daemon(tmp_path, "--simulate", "2", GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        short, long = ask(running), ask(running)
        known_to_its_worker(running, long)
        with opening(tmp_path / "note", *devices, **long["env"]) as training:
            release(running, short)
            waiting = ask(running)
            eventually(lambda: lease(running, waiting["id"])["state"] == "active", 10, running.story)
            (clean,) = [event for event in events(running) if event["kind"] == "gpu.clean"]
            assert clean["lease_id"] == short["id"]
            assert "device file" not in (clean["reason"] or "")
            assert training.poll() is None


def test_a_process_of_no_lease_that_has_the_device_file_open_delays_a_gpu_and_is_named(
    tmp_path: Path, devices: tuple[Path, Path]
) -> None:
    options = ("--simulate", "2", "--retained-memory-s", "2")
    with daemon(tmp_path, *options, GPULEASE_DEVICE_FILES=str(tmp_path / "nvidia")) as running:
        held = ask(running)
        known_to_its_worker(running, held)
        with opening(tmp_path / "note", *devices) as exporter:
            release(running, held)

            def draining() -> list[str]:
                shown = running.call("GET", "/v1/gpus").json["items"]
                return [one["reason"] or "" for one in shown if one["state"] == "draining"]

            said = f"nothing of that lease is left; pid {exporter.pid} of "
            eventually(lambda: any(said in reason for reason in draining()), 10, running.story)
            assert any("which delays it by at most 2 s" in reason for reason in draining())
            eventually(lambda: not draining(), 10, running.story)
            (clean,) = [event for event in events(running) if event["kind"] == "gpu.clean"]
            assert f"device file still open by pid {exporter.pid} of " in clean["reason"]
            assert exporter.poll() is None


def test_a_leased_gpu_is_exclusive_where_the_administrator_wants_that(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1", "--manage-compute-mode") as running:
        held = ask(running)
        eventually(lambda: gpu(running)["compute_mode"] == "exclusive_process", 10, running.story)
        sentence = running.call("GET", f"/v1/leases/{held['id']}/explain").json["sentence"]
        assert "EXCLUSIVE_PROCESS: one process on each at a time" in sentence
        release(running, held)
        eventually(lambda: gpu(running)["compute_mode"] == "default", 10, running.story)
        assert gpu(running)["state"] == "free"


def test_a_process_that_belongs_to_nobody_keeps_the_gpu_and_is_in_conflict_with_a_holder(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"

    def show(*pids: int) -> None:
        listed = [{"pid": pid, "memory_bytes": 2**30} for pid in pids]
        new = tmp_path / "new.json"
        new.write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "processes": listed}]}))
        new.rename(machine)

    with started("sleep", "600") as stranger:
        show(stranger.pid)
        with daemon(tmp_path, "--simulate", str(machine)) as running:
            words = f"is used outside any lease by pid {stranger.pid} of "
            eventually(lambda: words in (gpu(running)["reason"] or ""), 10, running.story)
            assert gpu(running)["state"] == "foreign"
            waiting = ask(running)
            assert waiting["state"] == "queued"
            show()
            eventually(lambda: lease(running, waiting["id"])["state"] == "active", 10, running.story)
            show(stranger.pid)
            eventually(lambda: gpu(running)["activity"] == "conflict", 10, running.story)
            (problem,) = lease(running, waiting["id"])["problems"]
            assert f"pid {stranger.pid} of " in problem
            assert problem.endswith("(sleep 600), outside this lease.")
            show()
            eventually(lambda: lease(running, waiting["id"])["problems"] == [], 10, running.story)
            kinds = [event["kind"] for event in events(running)]
            assert (kinds.count("gpu.conflict"), kinds.count("gpu.conflict_over")) == (1, 1)


def test_the_process_that_asked_and_its_children_are_the_holders_without_any_marker(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"gpus": [{"uuid": "GPU-0"}]}))
    with (
        daemon(tmp_path, "--simulate", str(machine)) as running,
        Client(running.url) as client,
        client.lease(ttl_s=60) as held,
        started("sleep", "600") as child,
    ):
        listed = [{"pid": pid, "memory_bytes": 2**30} for pid in (os.getpid(), child.pid)]
        machine.with_suffix(".new").write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "processes": listed}]}))
        machine.with_suffix(".new").rename(machine)
        eventually(lambda: len(gpu(running)["processes"]) == 2, 10, running.story)
        eventually(lambda: all(one["lease_id"] == held.id for one in gpu(running)["processes"]), 10, running.story)
        assert lease(running, held.id)["holder"]["owner_pid"] == os.getpid()
        assert not [event for event in events(running) if event["kind"] == "gpu.conflict"]


def test_a_request_that_does_not_wait_is_granted_as_soon_as_a_stranger_is_gone(tmp_path: Path) -> None:
    """Process lists are read every 5 s, and a refusal that rested on such an old one would be wrong for so long."""
    file = tmp_path / "gpus.json"
    one: dict[str, Any] = {"uuid": "GPU-00000000-0000-0000-0000-000000000000"}
    file.write_text(json.dumps({"gpus": [one | {"processes": [{"pid": 3999999}]}]}))
    with daemon(tmp_path, "--simulate", str(file)) as running:
        refused = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
        assert refused.problem() == (409, "not_now")
        replacement = file.with_suffix(".new")
        replacement.write_text(json.dumps({"gpus": [one]}))
        replacement.rename(file)
        asked = {"count": 1, "queue": False}
        eventually(lambda: running.call("POST", "/v1/leases", asked).status == 201, 2, running.story)
