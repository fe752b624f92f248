"""An elastic job on hosts with a network, processes and disks of their own: the host with rank 0 dies, the training
goes on with the two others from its checkpoint, and with the host again when it is back."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import events, eventually
from tests.host_fleet import Fleet, fleet
from tests.hosts import Host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODES = ("n1", "n2", "n3")
TRAIN = """
import pathlib, signal, sys, time
import torch, torch.distributed as dist

place, told = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
torch.set_num_threads(1)
dist.init_process_group("gloo")
checkpoint, steps = place / "checkpoint", place / "steps"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
while True:
    ends = torch.tensor(float(bool(told) or (place / "finish").exists()))
    dist.all_reduce(ends)
    step += 1
    if dist.get_rank() == 0:
        (place / "unfinished").write_text(str(step))
        (place / "unfinished").replace(checkpoint)
        with steps.open("a") as file:
            file.write(f"{dist.get_world_size()} {step}\\n")
    if ends:
        break
    time.sleep(0.2)
dist.destroy_process_group()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Fleet, dict[str, Host]]]:
    """A daemon and three hosts with one GPU each."""
    (tmp_path / "fleet").mkdir()
    with fleet(tmp_path / "fleet") as made:
        found = {}
        for name in NODES:
            found[name] = made.host(name)
            made.start_worker(found[name], name, 1)
        yield made, found


@pytest.mark.budget(300)
def test_a_host_dies_and_training_goes_on_and_it_takes_part_again(
    hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path
) -> None:
    made, found = hosts
    (tmp_path / "train.py").write_text(TRAIN)

    def steps() -> list[tuple[int, int]]:
        """World size and number of each step that was trained."""
        path = tmp_path / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(world), int(step)) for world, step in (line.split() for line in lines)]

    def worlds() -> list[int]:
        """The world sizes that it was trained with, one after the other."""
        return [world for world, _ in itertools.groupby(steps(), lambda step: step[0])]

    def story() -> str:
        return f"{made.daemon.job(job_id)}\n{steps()[-5:]}\n{made.daemon.story()}"

    fields = {"launcher": "torchrun", "gpus": 1, "nodes": 2, "max_nodes": 3, "interpreter": sys.executable}
    job_id = made.daemon.submit(str(tmp_path / "train.py"), str(tmp_path), working_directory=str(tmp_path), **fields)
    eventually(lambda: len(steps()) > 3, 240, story)
    assert worlds() == [3]
    lease_id = made.daemon.job(job_id)["lease_id"]
    gone = made.daemon.job(job_id)["members"][0]["node"]
    found[gone].cut()  # without it, the kernel would still say good-bye for its processes
    found[gone].power_off()
    eventually(lambda: worlds() == [3, 2], 240, story)
    shrunk = made.daemon.job(job_id)
    assert gone not in [member["node"] for member in shrunk["members"]]
    assert (shrunk["lease_id"], shrunk["attempts"]) == (lease_id, 2)
    assert made.states(gone) == ["unknown"]
    resumed = next(step for world, step in steps() if world == 2)
    assert resumed > 3, "it began from the start"

    made.workers.pop(gone).wait()
    made.launch_worker(made.host(gone), gone, 1)
    eventually(lambda: worlds() == [3, 2, 3], 240, story)
    (tmp_path / "finish").touch()
    ended = made.daemon.wait_job(job_id, within_s=120)
    assert (ended["state"], ended["lease_id"]) == ("succeeded", lease_id), ended
    assert all(attempt["regrouped"] for attempt in ended["attempt_history"]), "no retry"
    lost, *others, back = [attempt["reason"] for attempt in ended["attempt_history"]]
    assert f"Node {gone} is silent." in lost
    assert back == f"It started again with node {gone}."
    # Each change of nodes is one attempt more. There is a third change only where the host, once it was back, was
    # unknown for over 15 s just as the others had stopped for it: they go on without it, and stop for it once more.
    assert others == ["The node it was stopped for is away again."] * len(others)
    unknown = [one["reason"] for one in events(made.daemon) if (one["kind"], one["node"]) == ("node.unknown", gone)]
    assert len(others) < len([reason for reason in unknown if reason != "The probe is starting."]), unknown
    numbers = [step for _, step in steps()]
    assert numbers == sorted(numbers), "a step was lost"
    eventually(lambda: all(made.states(node) == ["free"] for node in NODES), 120, story)
