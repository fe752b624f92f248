"""`gpulease adopt` for a real process on a simulated GPU; tests/api/test_adoption_api.py has the rest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.api.test_lease_owner_api import killed
from tests.cli.programs import environ
from tests.daemon import daemon, eventually
from tests.imported_program import completed

UUID = "GPU-00000000-0000-0000-0000-000000000001"


@pytest.mark.budget(20)
def test_a_process_that_was_started_without_a_lease_gets_one_that_ends_with_it(tmp_path: Path) -> None:
    hardware = tmp_path / "gpus.json"

    def show(*pids: int) -> None:
        processes = [{"pid": pid, "type": "compute", "memory_bytes": 2**30} for pid in pids]
        (tmp_path / "new").write_text(json.dumps({"gpus": [{"uuid": UUID, "processes": processes}]}))
        (tmp_path / "new").rename(hardware)

    show()
    with daemon(tmp_path, "--simulate", str(hardware)) as running, killed("sleep", "600") as training:
        address = f"unix://{running.socket}"

        def gpulease(*words: str) -> subprocess.CompletedProcess[str]:
            return completed(words, environ(GPULEASE_URL=address), timeout_s=60)

        refused = gpulease("adopt", str(training.pid))
        assert refused.returncode == 1
        assert f"Process {training.pid} uses no GPU" in refused.stderr
        assert "`gpulease status` lists the processes" in refused.stderr
        show(training.pid)
        done = gpulease("adopt", str(training.pid), "--label", "by hand")
        assert done.returncode == 0, done.stderr
        with Client(address) as client:
            (lease,) = client.leases(LeaseState.ACTIVE)
            assert (lease.holder.owner_pid, lease.holder.label) == (training.pid, "by hand")
            assert f"({lease.id}), until sleep (pid {training.pid}) ends" in done.stdout
            assert gpulease("adopt", str(training.pid)).returncode == 1
            training.kill()
            training.wait()
            gone = gpulease("adopt", str(training.pid))
            assert gone.returncode == 2
            assert f"PID: there is no process {training.pid}" in gone.stderr
            eventually(lambda: client.lease_by_id(lease.id).end_reason == "holder_died", 30, running.story)
