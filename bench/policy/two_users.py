"""`python -m bench.policy.two_users`: a sweep of one user and a training of another, with real processes.

One user submits 200 jobs of one GPU. When the first 20 of them have ended, another submits a training with DDP on all
four GPUs. Both are asked for with and without fair share. The GPUs are simulated; users, jobs, torchrun and gloo are
real. It needs root, which alone can send requests as two users.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.daemon import installed
from tests.daemon import DaemonProcess
from tests.http_as_user import call

GPUS = 4
SWEEP, TRAINING = 54321, 0
"""A user without a name, and root, who may execute this Python wherever it lies."""
ENDED_BEFORE = 20
"""Jobs of the sweep before the training is asked for."""
TRIAL = ["sleep", "1.5"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_digits.py"
BOUND_S = 1800.0
RULES: dict[str, Sequence[str]] = {
    "first come, first served": (),
    "fair share": ("--fair-share",),
    "fair share, strict order": ("--fair-share", "--max-bypass", "0"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Print the table. 0."""
    options = parser().parse_args(words)
    if os.geteuid() != 0:
        print("Only root can send requests as two users.", file=sys.stderr)
        return 2
    heads = [
        "rule",
        "training waits",
        "trials wait, mean",
        "trials wait, longest",
        "all done after",
        "trials started before it",
    ]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for rule, words_of_rule in RULES.items():
        print("| " + " | ".join([rule, *day(options.trials, *words_of_rule)]) + " |", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("python -m bench.policy.two_users", description=__doc__)
    found.add_argument("--trials", type=int, default=200, help="jobs of the sweep")
    return found


def day(trials: int, *options: str) -> list[str]:
    """One run: the cells of its row."""
    with tempfile.TemporaryDirectory(prefix="gpulease-two-users-") as place:
        Path(place).chmod(0o711)  # other users pass through to the socket
        with installed(Path(place), "--simulate", str(GPUS), *options) as running:
            begun = time.perf_counter()
            body: dict[str, Any] = {
                "command": TRIAL,
                "launcher": "plain",
                "working_directory": "/",
                "array": {"indices": f"0-{trials - 1}"},
            }
            array = answered(running, "POST", "/v1/jobs", body, SWEEP)["array_id"]
            sweep = f"/v1/jobs?array={array}&limit={trials}"
            until(lambda: len(ended(running, sweep)) >= min(ENDED_BEFORE, trials // 2), running)
            body = {"command": [str(EXAMPLE), "--epochs", "2"], "launcher": "torchrun", "gpus": GPUS}
            body |= {"interpreter": sys.executable, "working_directory": place}
            job = answered(running, "POST", "/v1/jobs", body, TRAINING)["id"]
            until(lambda: len(ended(running, sweep)) == trials, running)
            training = running.wait_job(job, within_s=BOUND_S)
            lasted_s = time.perf_counter() - begun
            assert training["state"] == "succeeded", f"{training}\n{running.job_log(job)}"
            waits = [wait_s(one) for one in ended(running, sweep)]
            began, ends = training["created_at"], training["started_at"]
            passed = sum(began < one["started_at"] < ends for one in ended(running, sweep))
    return [
        f"{wait_s(training):.1f} s",
        f"{statistics.fmean(waits):.1f} s",
        f"{max(waits):.1f} s",
        f"{lasted_s:.1f} s",
        f"{passed} of {trials}",
    ]


def answered(running: DaemonProcess, method: str, path: str, body: dict[str, Any], uid: int) -> dict[str, Any]:
    """What a user's request is answered."""
    answer = call(running.socket, method, path, body, uid=uid)
    assert answer.status == 201, answer.content
    return dict(answer.json)


def ended(running: DaemonProcess, sweep: str) -> list[dict[str, Any]]:
    """The trials that have succeeded."""
    return list(running.get(f"{sweep}&state=succeeded").json["items"])


def until(done: Callable[[], bool], running: DaemonProcess) -> None:
    """Look twice a second."""
    bound_s = time.monotonic() + BOUND_S
    while not done():
        assert time.monotonic() < bound_s, running.story()
        time.sleep(0.5)


def wait_s(job: dict[str, Any]) -> float:
    """Seconds from the submission of a job to its start."""
    submitted, started = (datetime.fromisoformat(job[name]) for name in ("created_at", "started_at"))
    return (started - submitted).total_seconds()


if __name__ == "__main__":
    sys.exit(main())
