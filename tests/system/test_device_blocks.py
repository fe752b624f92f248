"""Blocks of `usable_cuda_devices` in threads, processes and tasks at once, through restarts of the daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import environ
from tests.daemon import daemon, events, eventually
from tests.device_trials import RUNNERS, TRIAL, TRIALS, check_no_overlap

pytestmark = pytest.mark.slow

KILLED = "import gpulease, os\nwith gpulease.usable_cuda_devices(1): os.kill(os.getpid(), 9)"


def test_trials_of_all_kinds_never_share_a_gpu_though_the_daemon_restarts_and_some_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def have_ended(trials: int) -> bool:
        """True when so many trials have, and each program has begun one: a first call is not repeated in an outage."""
        written = [json.loads(line) for line in log.read_text().splitlines()]
        programs = {number // 100 for _, number, _ in written}
        return len(programs) == len(RUNNERS) and [kind for kind, *_ in written].count("end") >= trials

    with daemon(tmp_path) as running:
        environment = environ(GPULEASE_URL=running.url)
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", TRIAL + runner, str(log), str(100 * place)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place, runner in enumerate(RUNNERS.values())
        ]
        killed = [subprocess.Popen([sys.executable, "-c", KILLED], env=environment) for _ in range(3)]
        for trials in (6, 18):
            eventually(lambda trials=trials: have_ended(trials), 120, running.story)
            running.kill()
            running.start()
        said = [program.communicate(timeout=240)[1] for program in programs]
        assert [program.returncode for program in programs] == [0, 0, 0], said
        assert [program.wait(120) for program in killed] == [-9, -9, -9]
        running.wait_free()
        granted: dict[str, set[str]] = {}
        for event in events(running):
            if event["kind"] == "lease.granted":
                assert not set(event["gpus"]) & {gpu for held in granted.values() for gpu in held}, event
                granted[event["lease_id"]] = set(event["gpus"])
            elif event["kind"] == "lease.ended":
                granted.pop(event["lease_id"], None)
        assert not granted
    check_no_overlap(log.read_text(), len(RUNNERS) * TRIALS)
