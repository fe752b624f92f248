"""The ranks of one training take exactly one lease, and it ends when their launcher does, however that ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.digits import LIGHT_DIGITS

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch")]

SAY = """
import json, os, sys, time
from pathlib import Path
from gpulease import find_usable_cuda_devices
place = Path(sys.argv[1])
found = find_usable_cuda_devices(2, wait_s=60)

def say_and_wait(rank):
    view = {"found": found, "again": find_usable_cuda_devices(-1), "pid": os.getpid()}
    (place / f"new-{rank}").write_text(json.dumps(view))
    (place / f"new-{rank}").rename(place / f"rank-{rank}")
    until = time.monotonic() + 90
    while not (place / "go").exists() and time.monotonic() < until:
        time.sleep(0.01)
    if error := (place / "go").read_text():
        raise RuntimeError(error)
"""
"""What a rank finds, said in a file; then it waits until it may end, with the error that it is told."""

TORCHRUN = SAY + 'say_and_wait(os.environ["RANK"])\n'

LIGHTNING = (
    SAY
    + """
import lightning, torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Wait(lightning.Callback):
    def on_train_start(self, trainer, module):
        say_and_wait(trainer.global_rank)

lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=len(found), max_steps=1, callbacks=[Wait()], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
).fit(BoringModel())
"""
)
COMMANDS = {
    "torchrun": (TORCHRUN, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", "."]),
    "lightning": (LIGHTNING, ["train.py", "."]),
}


ENDS = ("exit", "exception", "SIGTERM", "SIGKILL")
SHOWN_ELSEWHERE = {("lightning", "exit"), ("torchrun", "exit"), ("lightning", "exception")}
"""In the slow lane `test_launcher_pages.py` shows the first two. After an exception a launcher exits, whichever it is:
torchrun shows that here."""
CASES = [
    pytest.param(*case, marks=[pytest.mark.soak] if case in SHOWN_ELSEWHERE else [])
    for case in itertools.product(COMMANDS, ENDS)
]


@pytest.mark.parametrize(("launched_by", "end"), CASES)
def test_two_ranks_take_one_lease_that_ends_with_their_launcher(
    running: DaemonProcess, tmp_path: Path, launched_by: str, end: str
) -> None:
    running.wait_free(60)
    before = {lease["id"] for lease in leases(running)}
    script, command = COMMANDS[launched_by]
    (tmp_path / "train.py").write_text(script)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "CUDA_"))}
    clean |= LIGHT_DIGITS | {"GPULEASE_URL": running.url}
    with (tmp_path / "errors").open("w") as errors:
        launcher = subprocess.Popen([sys.executable, *command], cwd=tmp_path, stderr=errors, env=clean)
    views: list[dict[str, Any]] = []
    try:
        eventually(lambda: len(list(tmp_path.glob("rank-*"))) == 2, 180, (tmp_path / "errors").read_text)
        views = [json.loads(path.read_text()) for path in tmp_path.glob("rank-*")]
        assert [(view["found"], view["again"]) for view in views] == [([0, 1], [0, 1])] * 2
        (lease,) = [lease for lease in leases(running) if lease["id"] not in before]
        assert len(lease["gpus"]) == 2
        assert lease["holder"]["owner_pid"] == launcher.pid
        assert lease["liveness"] == "process"
        if end in ("exit", "exception"):
            go(tmp_path, "the training failed" if end == "exception" else "")
        else:
            launcher.send_signal(signal.Signals[end])
        if end == "SIGTERM" and launched_by == "lightning":
            go(tmp_path, "")  # it ends after the step that it is in
        code = launcher.wait(120)
        # After a gloo collective torch may abort while the interpreter ends, with all its work done.
        expected = {"exit": code in (0, -signal.SIGABRT), "SIGTERM": True}.get(end, code != 0)
        assert expected, (tmp_path / "errors").read_text()
        eventually(lambda: running.lease(lease["id"])["state"] == "ended", 60)
    finally:
        launcher.kill()
        launcher.wait()
        if not (tmp_path / "go").exists():
            go(tmp_path, "the launcher is gone")  # which leaves its ranks alive
    for view in views:
        eventually(lambda pid=view["pid"]: not os.path.exists(f"/proc/{pid}"), 60)
    running.wait_free(60)


def go(place: Path, error: str) -> None:
    """Let the ranks end, with this error if it is one."""
    (place / "new-go").write_text(error)
    (place / "new-go").rename(place / "go")


def leases(running: DaemonProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.call("GET", "/v1/leases?limit=1000").json["items"]
    return found
