"""Promise 10: a hung driver makes its GPUs `unknown` and nothing else, and only the probe ever has the driver open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import DaemonProcess, daemon, eventually
from tests.system.hardware import HANGS_S, Hardware

LIBRARY = "libnvidia-ml.so.1"
STAND_IN = Path(__file__).parents[1] / "worker" / "stand_in_nvml.c"


@contextmanager
def worker(running: DaemonProcess, node: str, simulate: Path) -> Iterator[None]:
    """A second node of the daemon."""
    command = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", node]
    command += ["--data-dir", str(running.data_dir.parent / node), "--simulate", str(simulate)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def states(running: DaemonProcess, node: str) -> set[str]:
    return {gpu["state"] for gpu in running.call("GET", "/v1/gpus").json["items"] if gpu["node"] == node}


def mapped(running: DaemonProcess) -> dict[str, list[str]]:
    """Which of the daemon's processes have the driver's library in their memory, by what each is."""
    assert running.process is not None
    daemon_process = psutil.Process(running.process.pid)
    found: dict[str, list[str]] = {"with": [], "without": []}
    for process in (daemon_process, *daemon_process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError):  # it ends at this moment
            command, maps = process.cmdline(), Path(f"/proc/{process.pid}/maps").read_text()
            kind = next((word for word in ("gpulease_worker.probe.main", "worker") if word in command), "other")
            kind = "serve" if process == daemon_process else kind
            found["with" if LIBRARY in maps else "without"].append(kind)
    return found


def test_a_hung_driver_makes_its_gpus_unknown_and_nothing_else(tmp_path: Path) -> None:
    hung, sound = Hardware(tmp_path / "n1.json", gpus=2), Hardware(tmp_path / "n2.json", gpus=2)
    sound.uuids = [uuid.replace("GPU-0", "GPU-f") for uuid in sound.uuids]
    sound.show()
    go = tmp_path / "go"
    with (
        daemon(tmp_path, "--simulate", str(hung.path), "--node", "n1") as running,
        worker(running, "n2", sound.path),
    ):
        eventually(lambda: states(running, "n2") == {"free"}, 60, running.story)
        held = running.call("POST", "/v1/leases?wait_s=60", {"count": 1, "node": "n1", "ttl_s": 600}).json
        command = ["sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; exit 7"]
        submitted: dict[str, Any] = {"command": command, "launcher": "plain", "node": "n1"}
        job = running.call("POST", "/v1/jobs", submitted).json
        eventually(lambda: running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "running", 60, running.story)
        hung.hang_s = HANGS_S
        hung.show()
        eventually(lambda: states(running, "n1") == {"unknown"}, 30, running.story)

        eventually(lambda: states(running, "n2") == {"free"}, 60, running.story)
        both = running.call("POST", "/v1/leases?wait_s=60", {"count": 2})
        assert (both.status, {gpu["node"] for gpu in both.json["gpus"]}) == (201, {"n2"})
        renewed = running.call("POST", f"/v1/leases/{held['id']}/renew", {"token": held["token"]})
        assert (renewed.status, renewed.json["state"]) == (200, "active")
        go.touch()
        ended = running.call("GET", f"/v1/jobs/{job['id']}?wait_s=60&wait_while=running").json
        assert (ended["state"], ended["exit_code"]) == ("failed", 7), "the job of the hung node was not looked after"
        assert running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]}).status == 200
        waiting = running.call("POST", "/v1/leases", {"count": 1, "node": "n1"})
        assert waiting.status == 202
        why = running.call("GET", f"/v1/leases/{waiting.json['id']}/explain").json
        assert why["verdict"] == "not_now"
        assert "did not answer within" in why["sentence"]
        assert states(running, "n1") == {"unknown"}

        hung.hang_s = 0.0
        hung.show()
        granted = running.call("GET", f"/v1/leases/{waiting.json['id']}?wait_s=60&wait_while=queued").json
        assert granted["state"] == "active", "the node did not come back by itself"


@pytest.fixture
def real_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build a stand-in for the driver's library, of these flags, and have every process find it."""

    def build(*flags: str) -> None:
        library = tmp_path / "lib" / LIBRARY
        library.parent.mkdir()
        compiler = ["gcc", "-shared", "-fPIC", "-o", str(library), str(STAND_IN), *(f"-D{flag}" for flag in flags)]
        subprocess.run(compiler, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}")

    return build


def test_only_the_probe_has_the_driver_open_and_no_one_while_the_node_is_paused(
    tmp_path: Path, real_binding: Any
) -> None:
    real_binding()
    with daemon(tmp_path, "--node", "n1") as running:
        eventually(lambda: len(running.call("GET", "/v1/gpus").json["items"]) == 2, 60, running.story)
        assert mapped(running)["with"] == ["gpulease_worker.probe.main"]
        assert sorted(mapped(running)["without"]) == ["serve", "worker"]

        assert running.call("POST", "/v1/nodes/n1/pause").status == 200
        closed = "paused by an administrator"
        eventually(lambda: running.call("GET", "/v1/nodes/n1").json["reason"] == closed, 30, running.story)
        assert mapped(running)["with"] == []

        assert running.call("POST", "/v1/nodes/n1/resume").status == 200
        eventually(lambda: running.call("GET", "/v1/nodes/n1").json["state"] == "ready", 60, running.story)
        assert mapped(running)["with"] == ["gpulease_worker.probe.main"]


def test_a_driver_that_never_lets_nvml_open_leaves_the_daemon_answering(tmp_path: Path, real_binding: Any) -> None:
    real_binding("INIT_HANGS")
    running = DaemonProcess(tmp_path / "d", "--node", "n1")
    try:
        running.start(ready=False)
        eventually(lambda: "n1" in running.call("GET", "/v1/nodes").content.decode(), 60, running.story)
        assert running.call("GET", "/v1/nodes/n1").json["state"] == "unknown"
        assert running.call("GET", "/readyz").problem() == (503, "unavailable")
        assert running.call("POST", "/v1/leases", {"count": 1}).status == 202
        assert running.call("POST", "/v1/leases", {"count": 1, "queue": False}).problem() == (409, "not_now")
    finally:
        running.stop()
