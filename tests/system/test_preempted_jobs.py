"""A real job that is preempted saves what it has, gives its GPU to the one that waits, and goes on from there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.daemon import daemon, eventually

JOB = """
import pathlib, signal, sys, time

saved = pathlib.Path(sys.argv[1])
done = int(saved.read_text()) if saved.exists() else 0
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
print("begins at", done, flush=True)
while done < 1 and not told:
    time.sleep(0.01)
if told:
    saved.write_text("1")
    print("saved", flush=True)
"""


def test_a_preempted_job_saves_ends_and_goes_on_after_the_one_that_waited(tmp_path: Path) -> None:
    options = ("--simulate", "1", "--preemption", "--preempt-after", "0.5", "--preempt-notice", "60")
    with daemon(tmp_path, *options) as running:
        script = tmp_path / "job.py"
        script.write_text(JOB)
        job_id = running.submit(sys.executable, str(script), str(tmp_path / "saved"), priority="scavenge")
        eventually(lambda: "begins at 0" in running.job_log(job_id), 60)
        waits = running.request_lease(ttl_s=600)
        assert waits["state"] == "queued"
        held = running.wait_active(waits["id"])

        eventually(lambda: running.job(job_id)["state"] == "queued", 60, running.story)
        preempted = running.job(job_id)
        assert preempted["preempted"] == 1
        [attempt] = preempted["attempt_history"]
        assert (attempt["preempted"], attempt["exit_code"]) == (True, 0)
        assert running.lease(attempt["lease_id"])["end_reason"] == "preempted"

        running.release(held)
        done = running.wait_job(job_id)
        assert (done["state"], done["attempts"], done["preempted"]) == ("succeeded", 2, 1)
        assert "begins at 1" in running.job_log(job_id)
