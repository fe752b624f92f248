"""The kernel provisioner: jupyter_client's own suites, its page, twenty kernels, and what is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.tools.sweep import FREED_WITHIN_S, TOOLS, Sweep, freed, leases_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPSTREAM = Path(sys.prefix) / "tools" / "upstream" / "jupyter_client"
PAGE = blocks(ROOT / "docs" / "tools" / "jupyter.md")
KERNEL = next(block.text for block in PAGE if block.language == "json")
RUN_IN_KERNEL = """
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
from jupyter_client import KernelManager

def gpu_kernel(number=0):
    # Its sockets are files: a TCP port that is chosen for a kernel may be another process's before the kernel binds it.
    return KernelManager(kernel_name="gpu", transport="ipc", ip=f"kernel-{number}")

def run(manager, code):
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=100)
    answer = client.execute_interactive(code, timeout=100)
    client.stop_channels()
    assert answer["content"]["status"] == "ok", answer["content"]
"""
TWENTY = """
def one(number):
    manager = gpu_kernel(number)
    manager.start_kernel()
    if number == 7:
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        manager.restart_kernel(now=True)
    run(manager, f"import trial; trial.hold({number})")
    manager.shutdown_kernel(now=True)

with ThreadPoolExecutor(6) as threads:
    list(threads.map(one, range(20)))
"""
RESTARTED = """
manager = gpu_kernel()
manager.start_kernel()
run(manager, "import trial; trial.hold(0)")
manager.restart_kernel()
run(manager, "import trial; trial.hold(1)")
manager.shutdown_kernel()
print("shut down")
"""
WAITING = """
manager = gpu_kernel()
manager.start_kernel()
run(manager, "import threading, trial; threading.Thread(target=trial.hold, args=(0, None, 300)).start()")
threading.Event().wait()
"""
REFUSED = """
try:
    gpu_kernel().start_kernel()
except Exception as error:
    print("refused:", error)
"""


@pytest.fixture
def kernels(sweep: Sweep) -> Sweep:
    """A sweep whose scripts find the kernelspec of the page; without its wait."""
    directory = sweep.place / "kernels" / "gpu"
    directory.mkdir(parents=True)
    spec = json.loads(KERNEL)
    del spec["metadata"]["kernel_provisioner"]["config"]["gpu_wait"]
    (directory / "kernel.json").write_text(json.dumps(spec))
    return sweep


def start(kernels: Sweep, script: str, **environment: str) -> subprocess.Popen[str]:
    return kernels.start(RUN_IN_KERNEL + script, JUPYTER_PATH=str(kernels.place), **environment)


@pytest.mark.budget(180)
@pytest.mark.parametrize(
    ("suite", "options", "passed"),
    [
        ("test_provisioning", ("-p", "jupyter_default"), 13),
        ("test_kernelmanager", ("-k", "not ipc and not AsyncKMSubclass"), 22),
        # Once more with sockets that are files, and with a manager that only counts its calls.
        pytest.param("test_kernelmanager", (), 34, id="all", marks=pytest.mark.soak),
    ],
)
def test_it_passes_the_suites_of_jupyter_client(
    sweep: Sweep, suite: str, options: tuple[str, ...], passed: int
) -> None:
    command = [str(TOOLS / "python"), "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={UPSTREAM}", *options]
    default = {} if "jupyter_default" in options else {"JUPYTER_DEFAULT_PROVISIONER_NAME": "gpulease-provisioner"}
    files = [f"{UPSTREAM}/tests/{suite}.py", "-p", "no:cacheprovider"]
    printed = sweep.run_command([*command, *files], 550, **default)
    assert re.search(rf"^{passed} passed", printed, re.MULTILINE), printed
    assert "failed" not in printed
    assert any(event["kind"] == "lease.granted" for event in sweep.events())
    eventually(lambda: not sweep.running.leases("active"), 60)


@pytest.mark.budget(90)
def test_twenty_kernels_go_through_four_gpus_though_one_is_killed(kernels: Sweep) -> None:
    kernels.wait(start(kernels, TWENTY))
    kernels.check(20, at_once=4)
    assert len([event for event in kernels.events() if event["kind"] == "lease.granted"]) == 20


def test_a_restart_keeps_the_gpus_and_a_shutdown_gives_them_back(kernels: Sweep) -> None:
    assert "shut down" in kernels.wait(start(kernels, RESTARTED))
    first, second = kernels.trials()
    assert first.pid != second.pid
    assert first.gpus == second.gpus
    (granted,) = [event for event in kernels.events() if event["kind"] == "lease.granted"]
    (ended,) = [event for event in kernels.events() if event["kind"] == "lease.ended"]
    assert (ended["lease_id"], ended["reason"]) == (granted["lease_id"], "released")


@pytest.mark.parametrize("victim", ["the kernel", "the server"])
def test_the_gpus_of_what_is_killed_are_free_within_seconds(
    kernels: Sweep, running: DaemonProcess, victim: str
) -> None:
    server = start(kernels, WAITING)
    try:
        (kernel,) = kernels.wait_for_trials(1)
        pid = kernel.pid if victim == "the kernel" else server.pid
        after = freed(running, leases_of(running, server.pid), lambda: os.kill(pid, signal.SIGKILL))
        eventually(lambda: not Path(f"/proc/{kernel.pid}/exe").exists(), 60)
        running.wait_free()
    finally:
        server.kill()
        server.wait(60)
        kernels.close()
    assert after.seconds < FREED_WITHIN_S


def test_who_gets_no_gpus_reads_why(kernels: Sweep, running: DaemonProcess) -> None:
    running.request_lease(4, label="sweep of bob")
    printed = kernels.wait(start(kernels, REFUSED, GPULEASE_WAIT_S="0"))
    assert "refused: gpulease: " in printed
    assert "sweep of bob" in printed
    assert running.leases("queued") == []


def test_the_page_is_as_it_says(sweep: Sweep) -> None:
    for block in PAGE:
        if (name := block.note("saved as")) is not None:
            (sweep.place / name).parent.mkdir(exist_ok=True)
            (sweep.place / name).write_text(block.text)
        elif block.language == "bash":
            printed = sweep.run_command(["bash", "-ec", block.text], HOME=str(sweep.place))
            assert re.search(r"^devices \[0\] of GPU-[0-9a-f-]{36}$", printed, re.MULTILINE), printed
