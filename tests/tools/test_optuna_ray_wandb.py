"""The pages of Optuna, Ray and W&B, run as they say."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.pages import ROOT, blocks
from tests.sweep_events import most_at_once
from tests.tools.sweep import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch")]


def run_page(sweep: Sweep, page: str) -> list[tuple[str, list[dict[str, object]]]]:
    """What each command of a page printed, and the leases that were granted meanwhile."""
    done = []
    for block in blocks(ROOT / "docs" / "tools" / page):
        if (name := block.note("saved as")) is not None:
            (sweep.place / name).write_text(block.text)
        elif block.language == "bash":
            (sweep.place / "output").unlink(missing_ok=True)
            sweep.seq = max((event["seq"] for event in sweep.events()), default=sweep.seq)
            printed = sweep.run_command(["bash", "-ec", block.text], WANDB_MODE="offline")
            log = sweep.events()
            most_at_once(log)
            done.append((printed, [event for event in log if event["kind"] == "lease.granted"]))
    return done


def test_optuna_in_threads_and_in_processes(sweep: Sweep) -> None:
    for printed, granted in run_page(sweep, "optuna.md"):
        trials = re.findall(r"^trial (\d+) on GPU [0-3]$", printed, re.MULTILINE)
        assert sorted(map(int, trials)) == list(range(12)), printed
        assert [len(lease["gpus"]) for lease in granted] == [1] * 12  # type: ignore[arg-type]


@pytest.mark.budget(90)
def test_ray_tasks_actors_and_tune(sweep: Sweep) -> None:
    (tasks, leases), (tuned, of_tune) = run_page(sweep, "ray.md")
    assert len(re.findall(r"^task: lr 0\.\d+ on GPU [0-3]$", tasks, re.MULTILINE)) == 6, tasks
    assert len(set(re.findall(r"^actor: lr 0\.\d+ on GPU ([0-3])$", tasks, re.MULTILINE))) == 2, tasks
    assert len(leases) == 8, "each task and each actor has a lease"
    assert "best lr 0.1" in tuned
    assert len(of_tune) == 4


def test_wandb_offline_and_the_command_of_its_agents(sweep: Sweep) -> None:
    ((printed, granted),) = run_page(sweep, "wandb.md")
    assert re.search(r"^lr 0\.3 on GPU [0-3]$", printed, re.MULTILINE), printed
    assert len(granted) == 1

    # What an agent makes of the command for one run.
    put_in = {"${interpreter}": ["python"], "${program}": ["train.py"], "${args}": ["--lr=0.01"]}
    command = json.loads((sweep.place / "sweep.json").read_text())["command"]
    printed = sweep.run_command([part for word in command for part in put_in.get(word, [word])], WANDB_MODE="offline")
    assert re.search(r"^lr 0\.01 on GPU 0$", printed, re.MULTILINE), printed
    assert len([event for event in sweep.events() if event["kind"] == "lease.granted"]) == 2, "one lease for each run"
