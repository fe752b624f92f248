"""The units of deploy/systemd, as far as they can be tried where systemd is not process 1."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gpulease_protocol.host.addresses import DEFAULT_URL, SOCKET_NAME, SYSTEM_DATA_DIR
from gpulease_worker.jobs import cgroup
from tests.daemon import DaemonProcess, eventually
from tests.imported_program import ForkedProgram, completed

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
WITHIN_S = 60.0
DELEGATE_SUBGROUP = 254
"""The version of systemd that came with this setting."""


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Callable[[], str]]]:
    """A daemon as systemd starts one, and what it says next."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(WITHIN_S)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        process = DaemonProcess(tmp_path / "d", "--simulate", "1", environment=told)
        try:
            yield process, lambda: listener.recv(4096).decode()
        finally:
            if process.process is not None:
                process.stop()


def test_systemd_hears_when_it_is_ready_that_it_lives_and_when_it_stops(
    notified: tuple[DaemonProcess, Callable[[], str]],
) -> None:
    process, says = notified
    process.start()
    while (said := says()) == "WATCHDOG=1":
        pass
    assert said == "READY=1"
    assert [says() for _ in range(3)] == ["WATCHDOG=1"] * 3
    process.stop()
    while (last := says()) == "WATCHDOG=1":
        pass
    assert last == "STOPPING=1"


def test_what_the_daemon_starts_cannot_speak_in_its_name(notified: tuple[DaemonProcess, Callable[[], str]]) -> None:
    process, _ = notified
    process.start()
    assert process.process is not None
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in children]
    assert any(b"GPULEASE_PARENT_PID" in environment for environment in environments)
    assert not any(b"NOTIFY_SOCKET" in environment or b"WATCHDOG" in environment for environment in environments)


def test_it_starts_where_no_one_listens_to_it(tmp_path: Path) -> None:
    gone = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "1000000"}
    process = DaemonProcess(tmp_path / "d", "--no-worker", environment=gone)
    try:
        process.start()
    finally:
        assert process.stop() == 0


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a program that is there."""
    program = tmp_path / "gpulease"
    program.symlink_to("/bin/true")
    for unit in UNITS.iterdir():
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/gpulease/bin/gpulease", str(program)))
    return tmp_path


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which("systemd-analyze"), "install the package systemd"
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=120, check=False)


def version() -> int:
    return int(analyze("--version").stdout.split()[1])


def test_systemd_understands_the_units(units: Path) -> None:
    done = analyze("verify", *(str(units / unit.name) for unit in UNITS.iterdir()))
    if version() < DELEGATE_SUBGROUP:
        (line,) = done.stderr.splitlines()
        assert re.search("Unknown key .*'DelegateSubgroup' .*, ignoring", line)
    else:
        assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "")


def test_systemd_would_say_what_it_does_not_understand(units: Path) -> None:
    unit = units / "gpulease.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=30", "WatchdgSec=30"))
    assert "WatchdgSec" in analyze("verify", str(unit)).stderr


def test_the_daemon_is_confined(units: Path) -> None:
    done = analyze("security", "--offline=yes", "--no-pager", "--threshold=30", str(units / "gpulease.service"))
    assert done.returncode == 0, done.stdout


def settings(unit: str, section: str = "Service") -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)  # EnvironmentFile= may be there twice
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(UNITS / unit)
    return parsed[section]


def test_systemd_holds_the_addresses_at_which_clients_look() -> None:
    opened = re.findall(r"^ListenStream=(.*)$", (UNITS / "gpulease.socket").read_text(), re.MULTILINE)
    port = urlsplit(DEFAULT_URL).port
    assert opened == [str(SYSTEM_DATA_DIR / SOCKET_NAME), f"127.0.0.1:{port}", f"[::1]:{port}"]
    service = settings("gpulease.service", "Unit")
    assert "gpulease.socket" in service["Wants"].split()
    assert "gpulease.socket" in service["After"].split()


def test_the_daemon_brings_its_addresses_and_its_worker_along_and_a_missing_one_is_named(tmp_path: Path) -> None:
    brought = {"gpulease.socket", "gpulease-worker.service"}
    assert {*settings("gpulease.service", "Unit")["Wants"].split()} == brought
    directory = tmp_path / "etc" / "systemd" / "system"
    directory.mkdir(parents=True)
    for name in ("gpulease.service", "gpulease.socket"):
        shutil.copy(UNITS / name, directory)

    def systemctl(*words: str) -> str:
        command = ["systemctl", f"--root={tmp_path}", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    assert "auxiliary unit gpulease-worker.service" in systemctl("enable", "gpulease.service")
    shutil.copy(UNITS / "gpulease-worker.service", directory)
    assert "auxiliary" not in systemctl("enable", "gpulease.service")
    assert systemctl("is-enabled", "gpulease.service", *brought).split() == ["enabled"] * 3


def test_systemd_never_gives_up_a_daemon_or_worker_that_cannot_start_yet() -> None:
    """By default it does so after five starts within 10 s, as while the database is away."""
    unit, pause_s = settings("gpulease.service", "Unit"), float(settings("gpulease.service")["RestartSec"])
    assert float(unit["StartLimitIntervalSec"]) / pause_s <= int(unit["StartLimitBurst"])
    assert settings("gpulease-worker.service", "Unit")["StartLimitIntervalSec"] == "0"


def test_a_worker_starts_after_what_cuda_needs_and_needs_none_of_it() -> None:
    unit = settings("gpulease-worker.service", "Unit")
    assert {"nvidia-fabricmanager.service", "nvidia-persistenced.service"} <= {*unit["After"].split()}
    assert not {"Wants", "Requires", "BindsTo"} & {*unit}


def test_jobs_outlive_their_worker_and_inherit_no_confinement() -> None:
    worker = settings("gpulease-worker.service")
    assert (worker["KillMode"], worker["Delegate"], worker["OOMPolicy"]) == ("process", "yes", "continue")
    # Limits of jobs take controllers in the unit's cgroup, and no process in it: the worker itself is in one below.
    assert worker["DelegateSubgroup"] == cgroup.LEAF
    confining = ("Private", "Protect", "Restrict", "System", "NoNew", "Capability", "Lock", "Memory", "ReadOnly")
    assert [name for name in worker if name.startswith(confining) and name not in ("RestartPreventExitStatus",)] == []


@pytest.mark.parametrize("unit", ["gpulease.service", "gpulease-worker.service"])
def test_a_unit_starts_a_command_that_exists(unit: str) -> None:
    program, *words = shlex.split(settings(unit)["ExecStart"])
    assert program == "/opt/gpulease/bin/gpulease"
    shown = completed([words[0], "--help"], os.environ, 60)
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in words if word.startswith("--no-") or word == "--url")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can drop capabilities and start jobs of others")
def test_the_capabilities_of_the_unit_are_enough(tmp_path: Path) -> None:
    kept = settings("gpulease.service")["CapabilityBoundingSet"].replace("CAP_", "+").lower().split()
    tmp_path.chmod(0o755)
    confined = ["setpriv", "--no-new-privs", f"--bounding-set=-all,{','.join(kept)}"]

    class Confined(DaemonProcess):
        @property
        def command(self) -> list[str]:
            return [*confined, *super().command]

    process = Confined(tmp_path / "d", "--no-worker")
    worker = None
    try:
        process.start()
        start = ["worker", "--url", process.url, "--simulate", "1", "--node", "n"]
        start += ["--data-dir", str(tmp_path / "d" / "worker")]
        worker = ForkedProgram(start, os.environ, tmp_path / "worker.log")
        eventually(lambda: process.call("GET", "/v1/gpus").json["items"] != [], WITHIN_S, process.story)
        body = '{"launcher": "plain", "command": ["sh", "-c", "id -u"], "working_directory": "/"}'
        curl = ["curl", "-sS", f"{process.url}/v1/jobs", "-H", "Content-Type: application/json", "-d", body]
        subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", *curl], check=True, timeout=60, capture_output=True
        )
        (job,) = process.call("GET", "/v1/jobs").json["items"]
        log_text = process.call("GET", f"/v1/jobs/{job['id']}/logs?follow=1").content
        assert log_text == b"65534\n", (tmp_path / "worker.log").read_text()
    finally:
        if worker is not None:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
        process.stop()
