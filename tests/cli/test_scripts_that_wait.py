"""What a script's terminal shows when its GPUs are in use: an error in one look, a wait that is announced, Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import Program, environ, wait_until

FIND = "import gpulease; print(gpulease.find_usable_cuda_devices(2))"
LEASE = "import gpulease; gpulease.Client().lease(count=2)"
ASYNC = """
import asyncio, gpulease
async def main():
    async with gpulease.AsyncClient() as client, client.lease(count=2):
        pass
asyncio.run(main())
"""
NO_DAEMON = {"GPULEASE_URL": "http://127.0.0.1:9"}


def own_frames(errors: str) -> list[str]:
    """The files of the traceback from the script's last line on."""
    files = re.findall(r'File "([^"]+)"', errors)
    last = len(files) - 1 - files[::-1].index("<string>")
    return files[last:]


@pytest.mark.parametrize("program", [FIND, LEASE, ASYNC], ids=["find", "Client", "AsyncClient"])
def test_a_refusal_is_two_frames_and_one_sentence(client: Client, python: Program, program: str) -> None:
    with client.lease(4, wait_s=60, label="evening run"):
        errors = python(program).stderr
    assert errors.count("Traceback") == 1, errors
    assert len(own_frames(errors)) == 2, errors
    sentence = errors.strip().split("\n")[-1]
    assert sentence.startswith("gpulease.NotNow: ")
    assert len(re.findall(r"GPUs 0-3: \w+ \(evening run\) for \d+s\. ", sentence)) == 1, sentence
    assert len(sentence) < 240


@pytest.mark.parametrize("program", [FIND, LEASE], ids=["find", "Client"])
def test_a_daemon_that_is_away_is_said_in_two_frames(python: Program, program: str) -> None:
    errors = python(program, **NO_DAEMON).stderr
    assert (errors.count("Traceback"), len(own_frames(errors))) == (1, 2), errors
    assert errors.strip().endswith("Check the address (GPULEASE_URL), and that the daemon runs there.")


def test_a_wait_is_announced_and_ctrl_c_says_what_became_of_it(client: Client, url: str, tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with client.lease(4, wait_s=60, label="evening run"), said.open("w") as errors:
        script = subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-c", FIND],
            env=environ(GPULEASE_URL=url, GPULEASE_WAIT_S="10m", GPULEASE_WAIT="7"),
            stderr=errors,
        )
        try:
            wait_until(lambda: "Ctrl-C" in said.read_text(), 60, said.read_text)
            script.send_signal(signal.SIGINT)
            assert script.wait(60) == -signal.SIGINT
        finally:
            script.kill()
            script.wait()
        assert not client.leases(LeaseState.QUEUED)
    unknown, announced, gave_up, *traceback = said.read_text().splitlines()
    assert unknown.endswith("GPULEASE_WAIT is no variable of gpulease and has no effect. Did you mean GPULEASE_WAIT_S?")
    assert re.fullmatch(
        r"gpulease waits for 2 GPUs on \S+, 1st in the queue: GPUs 0-3: \w+ \(evening run\) for \d+s."
        r" Ctrl-C gives up\.",
        announced,
    )
    assert gave_up == "gpulease gave up: the request is out of the queue."
    assert traceback[-1] == "KeyboardInterrupt"
    assert not re.search("http|sansio", "".join(traceback))
    assert own_frames("\n".join(traceback))[1].endswith("brief_errors.py")


def test_a_process_gives_back_what_it_found_and_may_find_again(client: Client, python: Program) -> None:
    program = """
import gpulease, os
before = dict(os.environ)
print(gpulease.release())
for more in ({}, {"set_visible": True}):
    gpulease.find_usable_cuda_devices(2, wait_s=60, **more)
    print([len(lease.gpus) for lease in gpulease.release()], gpulease.reserved_leases())
    print(sorted(set(os.environ.items()) ^ set(before.items())))
print(sum(lease.end_reason == "released" for lease in gpulease.Client().leases("ended")) >= 2)
print(len(gpulease.find_usable_cuda_devices(1, wait_s=60)), [name for name in dir(gpulease) if name.startswith("_")])
"""
    result = python(program)
    assert "Traceback" not in result.stderr
    assert result.stdout.split("\n")[:-1] == ["()", *["[2] ()", "[]"] * 2, "True", "1 []"]
