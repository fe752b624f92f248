"""The findings of `gpulease doctor`, and how it gathers its facts."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import ComputeMode, GpuReading, Node, NodeMode, NodeState
from gpulease_worker import doctor_facts, doctor_joined
from gpulease_worker.commands.doctor import on_terminal
from gpulease_worker.doctor import CHECKS, examine, verdict
from gpulease_worker.doctor_findings import Certificate, Finding, HostFacts, Joined, Outcome
from gpulease_worker.doctor_service import UNITS
from gpulease_worker.processes.procfs import INITIAL_PID_NAMESPACE
from tests.client.fake_daemon import FakeDaemon
from tests.client.stand_in_cuda import Card, Cuda, machine, no_cuda
from tests.squatter import EVE, ROOT, Squatter
from tests.worker.stand_in import POOR, WHOLE, Driver


def gpu(index: int, **what: Any) -> GpuReading:
    return GpuReading(uuid=f"GPU-{index}", node="n", index=index, **{"compute_mode": ComputeMode.DEFAULT} | what)


WELL = HostFacts(
    kernel_driver="580.95.05",
    library="580.95.05",
    gpus=(gpu(0), gpu(1)),
    cuda=("GPU-0", "GPU-1"),
    pid_namespace=INITIAL_PID_NAMESPACE,
    network_of_host=True,
    claims=("pid 42, user root", "pid 42, user root"),
    persistence=(True, True),
    binding="/site-packages/pynvml.py",
    socket="/d/gpulease.sock",
    socket_mode=0o600,
    socket_opens=True,
    wall_s=1.8e9,
    newest_s=1.8e9 - 5,
    data_dir="/d",
    free_bytes=50 * 2**30,
    units=dict.fromkeys(UNITS, (True, True)),
    nodes=(Node(name="n", state=NodeState.READY, gpu_count=2, worker_version="0.1.0"),),
    daemon_version="0.1.0",
    program_version="0.1.0",
)
CERTIFICATE = Certificate(
    file="/c.pem", expires_s=1.8e9 + 90 * 86400, names=("gpubox.example", "localhost"), host_names=("gpubox.example",)
)
JOINED = Joined(url="https://gpubox:8750", node="n", own_host="n", worker_host="n")
NO_WORKER = "No worker has reported since this daemon started: nothing can be granted. Start one: gpulease worker."


def silent(name: str, mode: NodeMode = NodeMode.ACTIVE) -> Node:
    return Node(name=name, state=NodeState.UNKNOWN, mode=mode, gpu_count=2, reason=f"node {name} has been silent")


def found(facts: HostFacts) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(facts)}


def others_beside(what: dict[str, Any], check: str, outcome: Outcome, said: str, remedy: str) -> set[Outcome]:
    """Judge a host that is well except for `what`: one check finds that, in one line. The outcomes of the others."""
    findings = found(replace(WELL, **what))
    assert findings[check].health is outcome
    assert said in findings[check].sentence
    assert remedy in findings[check].remedy
    assert "\n" not in findings[check].sentence + findings[check].remedy
    return {finding.health for name, finding in findings.items() if name != check}


def test_a_driver_that_proc_does_not_show_is_not_said_to_be_missing_where_nvml_answers() -> None:
    facts = found(replace(WELL, kernel_driver=None))
    assert facts["driver"].health is facts["driver library"].health is Outcome.UNKNOWN
    assert "NVML answers" in facts["driver"].sentence
    assert "no driver" not in facts["driver library"].sentence
    assert facts["NVML"].health is Outcome.FINE


def test_on_a_host_that_is_well_every_check_is_fine() -> None:
    assert {finding.health for finding in examine(WELL)} == {Outcome.FINE}
    assert len(found(WELL)) == len(CHECKS)


@pytest.mark.parametrize(
    ("joined", "outcome", "said", "remedy"),
    [
        (None, Outcome.FINE, "has not joined", ""),
        (JOINED, Outcome.FINE, "It is node n of https://gpubox:8750", ""),
        (replace(JOINED, worker_host=None), Outcome.WARNING, "No worker reports for node n", "systemctl start"),
        (replace(JOINED, worker_host="m"), Outcome.WRONG, "A worker on host m reports for node n", "another name"),
        (JOINED.failed("No daemon answers.", "Check it."), Outcome.WRONG, "No daemon answers.", "Check it."),
    ],
)
def test_a_host_that_has_joined_a_daemon_elsewhere(joined: Joined, outcome: Outcome, said: str, remedy: str) -> None:
    units = {"gpulease-worker.service": (True, True)} if joined else WELL.units
    assert others_beside({"joined": joined, "units": units}, "node", outcome, said, remedy) == {Outcome.FINE}


def test_a_user_who_may_not_read_what_the_host_has_joined_is_not_told_to_set_up_a_daemon(tmp_path: Path) -> None:
    worker = {"gpulease-worker.service": (True, True)}
    findings = found(replace(WELL, joined_hidden=True, units=worker))
    assert (findings["node"].health, findings["units"].health) == (Outcome.UNKNOWN, Outcome.FINE)
    assert not doctor_joined.is_hidden(tmp_path)
    (tmp_path / "environment").touch()
    assert not doctor_joined.is_hidden(tmp_path)


@pytest.mark.parametrize(
    ("what", "check", "said", "remedy"),
    [
        ({"kernel_driver": None, "gpus": ()}, "driver", "No NVIDIA driver", "Install it"),
        ({"library": "580.105.08"}, "driver library", "580.105.08, the loaded driver 580.95.05", "Reboot"),
        ({"library": None, "nvml_problem": "x"}, "driver library", "was not found", "Install"),
        ({"binding": None}, "pynvml", "not installed", "pip install"),
        ({"binding": "/s/pynvml/__init__.py"}, "pynvml", "/s/pynvml/__init__.py", "pip uninstall -y pynvml"),
        ({"nvml_problem": "The probe did not answer within 10 s."}, "NVML", "did not answer", "nvidia-smi"),
        ({"gpus": (gpu(0), gpu(1, health="xid:79"))}, "NVML", "GPU 1 is xid:79", "for a reset"),
        ({"gpus": (gpu(0, health="mig"),)}, "NVML", "GPU 0 is mig", "-mig 0"),
        ({"gpus": (gpu(0, health="processes_unknown"),)}, "NVML", "GPU 0 is processes_unknown", "permission to list"),
        ({"gpus": (gpu(0, health="row_remap_failed"),)}, "NVML", "GPU 0 is row_remap_failed", "Replace the GPU."),
        ({"pid_namespace": 4026532999}, "PID namespace", "are hidden", "--pid=host"),
        (
            {"gpus": (gpu(0, health="fabric_not_ready"),), "cuda": None, "cuda_absent": True},
            "NVML",
            "GPU 0 is fabric_not_ready",
            "nvidia-fabricmanager",
        ),
        (
            {"cuda": None, "cuda_problem": "cuInit answers with error 802", "cuda_code": 802},
            "CUDA",
            "CUDA does not start: error 802, system not ready. The fabric manager is not running",
            "systemctl start nvidia-fabricmanager",
        ),
        ({"cuda": None, "cuda_problem": "it did not answer within 10 s"}, "CUDA", "within 10 s.", "dmesg"),
        (
            {"gpus": tuple(gpu(index, compute_mode=ComputeMode.PROHIBITED) for index in (0, 2))},
            "compute mode",
            "never granted",
            "nvidia-smi -i 0,2 -c DEFAULT",
        ),
        ({"socket_opens": False}, "socket", "does not let this user connect", "--socket-mode"),
        ({"wall_s": 0.0}, "clock", "before this program", "timedatectl"),
        ({"newest_s": 1.8e9 + 3600}, "clock", "3600 s in the future", "timedatectl"),
        ({"daemon_problem": "Not ready: x"}, "daemon", "Not ready: x", "log"),
        ({"free_bytes": 2**20}, "disk", "0.0 GiB", "Free some space"),
        ({"without_worker": NO_WORKER}, "workers", "No worker has reported", "systemctl start gpulease-worker.service"),
        ({"without_worker": NO_WORKER, "units": None}, "workers", "can be granted.", "Start one: gpulease worker."),
        ({"nodes": (silent("a"),)}, "workers", "a: node a has been silent", "systemctl status gpulease-worker"),
        (
            {"units": {"gpulease.service": (True, True), "gpulease.socket": (True, True)}},
            "units",
            "gpulease-worker.service is not installed: the daemon has no GPUs of this host",
            "gpulease setup",
        ),
        (
            {"units": dict.fromkeys(UNITS, (True, True)) | {"gpulease-worker.service": (True, False)}},
            "units",
            "gpulease-worker.service does not run",
            "systemctl start gpulease-worker.service; journalctl -u gpulease-worker.service shows why",
        ),
        (
            {"units": dict.fromkeys(UNITS, (True, True)) | {"gpulease.socket": (True, False)}},
            "units",
            "gpulease.socket does not run",
            "systemctl restart gpulease.service; journalctl -u gpulease.socket shows why",
        ),
        ({"certificate": replace(CERTIFICATE, expires_s=1.8e9 - 3 * 86400)}, "certificate", "3 days ago", "Renew it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_what_to_do(
    what: dict[str, Any], check: str, said: str, remedy: str
) -> None:
    others = others_beside(what, check, Outcome.WRONG, said, remedy)
    assert Outcome.WRONG not in others or check == "driver library", "one cause is reported as several"


@pytest.mark.parametrize(
    ("what", "check", "said", "remedy"),
    [
        (
            {"persistence": (True, False)},
            "persistence mode",
            "Off on GPU 1: the first use takes seconds",
            "nvidia-smi -pm 1",
        ),
        (
            {"gpus": (gpu(0, warnings=("row_remap_pending", "drain_p2p")), gpu(1))},
            "NVML",
            "GPU 0 has row_remap_pending and drain_p2p",
            "Reset it when it is idle",
        ),
        (
            {"gpus": (gpu(0, health="fabric_not_ready"), gpu(1, warnings=("fabric_not_ready",)))},
            "NVML",
            "GPU 0 has fabric_not_ready, GPU 1 has fabric_not_ready",
            "Nothing if jobs use 1 GPU each",
        ),
        ({"cuda": ()}, "CUDA", "shows no GPU", "MIG"),
        ({"network_of_host": False}, "claims", "not the host's network", "--network=host"),
        (
            {"claims": ("pid 42, user root", "pid 7, user ada")},
            "claims",
            "GPU 0: pid 42, user root; GPU 1: pid 7, user ada",
            "Stop all but one",
        ),
        ({"certificate": replace(CERTIFICATE, expires_s=1.8e9 + 3 * 86400)}, "certificate", "in 3 days", "Renew it"),
        ({"certificate": replace(CERTIFICATE, names=("other",))}, "certificate", "is for other; this host is", "name"),
        ({"units": dict.fromkeys(UNITS, (False, True))}, "units", "does not start with the host", "systemctl enable"),
        (
            {"nodes": (Node(name="n", state=NodeState.READY, gpu_count=2, worker_version="0.0.9"),)},
            "workers",
            "The daemon is of version 0.1.0, but n has 0.0.9",
            "restart the worker",
        ),
        ({"program_version": "0.2.0"}, "version", "gpulease 0.2.0, the daemon 0.1.0", "one release"),
        ({"port_strangers": ("[::1]:8750 (user eve)",)}, "port", "you have [::1]:8750 (user eve).", "End that program"),
    ],
)
def test_what_should_be_known_but_prevents_nothing_is_a_warning(
    what: dict[str, Any], check: str, said: str, remedy: str
) -> None:
    assert others_beside(what, check, Outcome.WARNING, said, remedy) == {Outcome.FINE}


@pytest.mark.parametrize(
    ("what", "check"),
    [
        ({"cuda": None, "cuda_problem": "libcuda.so.1: no such file", "cuda_absent": True}, "CUDA"),
        ({"gpus": (), "cuda": None}, "CUDA"),
        ({"library": None}, "driver library"),
        ({"kernel_driver": None, "daemon_has_gpus": True}, "driver"),
        ({"binding": None, "daemon_has_gpus": True}, "pynvml"),
        ({"binding": None, "nvml_problem": "nvidia-ml-py cannot be loaded"}, "NVML"),
        ({"kernel_driver": None, "nvml_problem": "NVML Shared Library Not Found"}, "NVML"),
        ({"persistence": None}, "persistence mode"),
        ({"gpus": ()}, "compute mode"),
        ({"gpus": (gpu(0, compute_mode=None),)}, "compute mode"),
        ({"pid_namespace": None}, "PID namespace"),
        ({"claims": (None, None)}, "claims"),
        ({"pid_namespace": 4026532999, "wsl": True}, "PID namespace"),
        ({"socket_mode": None}, "socket"),
        ({"free_bytes": None}, "disk"),
        ({"free_bytes": 2**20, "nodes": (silent("a"),)}, "workers"),
        ({"nodes": None, "daemon_problem": "No daemon answers."}, "workers"),
        ({"certificate": replace(CERTIFICATE, problem="Permission denied")}, "certificate"),
        ({"units": {}}, "units"),
    ],
)
def test_what_cannot_be_told_is_neither_fine_nor_wrong(what: dict[str, Any], check: str) -> None:
    assert found(replace(WELL, **what))[check].health is Outcome.UNKNOWN


def test_nothing_is_wrong_on_a_host_without_gpus_whose_daemon_simulates_them() -> None:
    without = {"kernel_driver": None, "library": None, "nvml_problem": "NVML Shared Library Not Found", "gpus": ()}
    simulating = replace(WELL, **without, persistence=None, daemon_has_gpus=True)
    assert Outcome.WRONG not in {finding.health for finding in examine(simulating)}
    idle = replace(simulating, daemon_has_gpus=False, daemon_problem="No daemon answers.")
    assert [finding.check for finding in examine(idle) if finding.health is Outcome.WRONG] == ["driver", "daemon"]


def test_what_is_fine_says_so() -> None:
    paused = found(replace(WELL, nodes=(silent("a", NodeMode.PAUSED),), certificate=CERTIFICATE))
    assert paused["workers"].health is Outcome.FINE
    assert paused["certificate"].sentence == "/c.pem is valid for 90 days more."
    of_options = found(replace(WELL, certificate=None))["certificate"]
    assert of_options.sentence == "The configuration of `serve` on this host names none."
    any_host = replace(CERTIFICATE, names=("*.example",))
    assert found(replace(WELL, certificate=any_host))["certificate"].health is Outcome.FINE


def test_a_page_of_another_program_is_not_said_to_be_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = FakeDaemon()
    daemon.fault = lambda line: "404"
    monkeypatch.setenv("GPULEASE_URL", daemon.url)
    try:
        found = doctor_facts._daemon({})
    finally:
        daemon.stop()
    assert "404" in found["daemon_problem"]
    assert found["daemon_remedy"] == "Check that a gpulease daemon listens there."


def test_a_daemon_whose_workers_see_no_gpu_is_not_said_to_grant() -> None:
    without_driver = replace(silent("a"), reason="The driver is not there. Try --simulate 4.")
    facts = found(replace(WELL, nodes=(without_driver,), units=None))
    assert facts["daemon"].sentence == "It answers."
    assert facts["workers"].sentence == "a: The driver is not there. Try --simulate 4."
    assert facts["workers"].remedy == "There: see the log of the worker, and gpulease doctor."


def test_what_is_wrong_comes_first_and_is_counted_at_the_end() -> None:
    ill = examine(replace(WELL, free_bytes=2**20, wall_s=0.0, persistence=(False,), gpus=(), library=None))
    words = [finding.health.value for finding in ill]
    assert words == sorted(words, key=["wrong", "warning", "fine", "unknown"].index)
    assert words[:3] == ["wrong", "wrong", "warning"]
    assert [verdict(found[:most]) for found, most in ((ill, 9), (ill, 1), (examine(WELL), 99))] == [
        "2 things are wrong",
        "1 thing is wrong",
        "nothing is wrong",
    ]


def test_on_a_terminal_sentences_have_a_column_of_their_own_and_the_word_a_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = on_terminal("wrong   ", f"{'driver':<17} {'word ' * 30}")
    assert shown.startswith("\x1b[31mwrong   \x1b[0m driver            word")
    assert {line[:27] for line in shown.splitlines()[1:]} == {" " * 27}
    assert max(map(len, shown.splitlines()[1:])) <= 80
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_terminal("wrong   ", "driver")


def test_a_certificate_is_read(tmp_path: Path) -> None:
    certificate = tmp_path / "c.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost", "-out", str(certificate)]
    subprocess.run([*words, "-keyout", str(tmp_path / "k.pem")], check=True, capture_output=True, timeout=60)
    known = doctor_facts.read_certificate(certificate)
    assert (known.problem, "localhost" in known.names) == (None, True)
    assert known.expires_s > time.time()
    assert doctor_facts.read_certificate(tmp_path / "absent").problem == "No such file or directory"
    (tmp_path / "garbage").write_text("x")
    assert doctor_facts.read_certificate(tmp_path / "garbage").problem


def test_a_user_of_the_system_s_daemon_is_told_of_its_directory_and_not_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, system = tmp_path / "own", tmp_path / "system"
    own.mkdir()
    monkeypatch.setattr(doctor_facts, "default_data_dir", lambda: own)
    monkeypatch.setattr(doctor_facts, "SYSTEM_DATA_DIR", system)
    monkeypatch.setattr(doctor_facts, "has_system_socket", lambda: True)
    assert doctor_facts.daemon_data_dir() == system
    (own / "gpulease.sock").touch()
    assert doctor_facts.daemon_data_dir() == own


def test_exclusive_process_is_fine_and_says_what_it_means() -> None:
    finding = found(replace(WELL, gpus=(gpu(0, compute_mode=ComputeMode.EXCLUSIVE_PROCESS),)))["compute mode"]
    assert finding.health is Outcome.FINE
    assert "one process at a time" in finding.sentence


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)",
            "580.95.05",
        ),
        ("nothing of the kind", None),
    ],
)
def test_the_version_of_the_loaded_driver_is_read(tmp_path: Path, line: str, version: str | None) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
    assert doctor_facts.kernel_driver(tmp_path / "version") == version
    assert doctor_facts.kernel_driver(tmp_path / "absent") is None


def test_the_version_of_the_library_is_that_of_the_file_that_its_name_leads_to(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.580.95.05").touch()
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    assert doctor_facts.library_version([tmp_path / "nowhere", tmp_path]) == "580.95.05"
    assert doctor_facts.library_version([tmp_path / "nowhere"]) is None


@pytest.mark.parametrize(
    ("fails", "health", "said"),
    [
        ("", Outcome.FINE, "It starts and shows 2 GPUs."),
        ("802", Outcome.WRONG, "CUDA does not start: error 802, system not ready"),
        ("999", Outcome.WRONG, "CUDA does not start: cuInit answers with error 999."),
        ("hang", Outcome.WRONG, "CUDA does not start: it did not answer within 3 s."),
        (None, Outcome.UNKNOWN, "It cannot be checked: "),
    ],
)
def test_cuda_itself_is_asked_whether_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str | None, health: Outcome, said: str
) -> None:
    deadline_s = 3.0 if fails == "hang" else 20.0
    driver = Driver(tmp_path)
    if fails is None:
        no_cuda(tmp_path)
    else:
        cards = (Card(one.uuid[4:].replace("-", "")) for one in (POOR, WHOLE))
        driver.variables |= {**Cuda(tmp_path).environment, "STAND_IN_FAILS": fails, "STAND_IN_CUDA": machine(*cards)}
    for name, value in {**driver.variables, "CUDA_VISIBLE_DEVICES": "7", "GPULEASE_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    finding = found(doctor_facts.gather(tmp_path, deadline_s=deadline_s))["CUDA"]
    assert finding.health is health
    assert said in finding.sentence


@pytest.mark.skipif(not ROOT, reason="only root can be another user")
def test_another_user_at_the_port_is_named(tmp_path: Path) -> None:
    with Squatter(("::1", 0), tmp_path / "record") as eve:
        named = f"[::1]:{eve.port} (user {EVE})"
        assert named in doctor_facts.port_strangers(eve.port), "others may have the port at 127.0.0.1"
    assert named not in doctor_facts.port_strangers(eve.port)


def test_the_facts_of_this_host_are_gathered_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_URL", "http://127.0.0.1:9")
    (tmp_path / "gpulease.db").touch()
    os.utime(tmp_path / "gpulease.db", (time.time() + 7200, time.time() + 7200))
    begun_s = time.monotonic()
    findings = found(doctor_facts.gather(tmp_path, deadline_s=5.0))
    assert time.monotonic() - begun_s < 30
    assert findings["daemon"].health is Outcome.WRONG
    assert "Connection refused" in findings["daemon"].sentence
    assert findings["clock"].health is Outcome.WRONG
    assert findings["disk"].health is not Outcome.UNKNOWN
    assert findings["pynvml"].health is Outcome.FINE
