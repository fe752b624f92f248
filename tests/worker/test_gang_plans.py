"""What each launcher is told on one node of several, and what the ranks find in their environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulease_protocol.launchers import usage_error
from gpulease_protocol.model import JobSpec, Launcher
from gpulease_protocol.node_protocol import GangPlace, JobOrder
from gpulease_worker.jobs import launch_plan, launcher_argv
from tests.worker.build import order, spec

LOGS = Path("/d/jobs/j/logs")
PLACE = GangPlace(rank=1, nodes=("a", "b"), addresses=("10.0.0.1", "10.0.0.2"))


def part(job: JobSpec, **env: str) -> JobOrder:
    """The order for node 1 of 2, with two GPUs on each."""
    made = order("j", job, lease="L", port=21007, gang=PLACE)
    return JobOrder(
        **{name: getattr(made, name) for name in made.__slots__} | {"env": made.env | {"MASTER_ADDR": "10.0.0.1"} | env}
    )


RANK = ("--no_python", "/bin/sh", "-c", launcher_argv.RANK_SCRIPT, str(LOGS), "/py", "-u", "t.py")


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (
            Launcher.TORCHRUN,
            (
                *("/py", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "1"),
                *("--master-addr", "10.0.0.1", "--master-port", "21007"),
                *("--log-dir", f"{LOGS}/torchrun", "--redirects", "3", "--tee", "3"),
                *("--no-python", *RANK[1:]),
            ),
        ),
        (
            Launcher.ACCELERATE,
            (
                *("/py", "-m", "accelerate.commands.launch", "--config_file", "/d/jobs/j/accelerate.json"),
                *("--multi_gpu", "--num_processes", "4", "--gpu_ids", "all"),
                *("--num_machines", "2", "--machine_rank", "1", "--rdzv_backend", "static"),
                *("--main_process_ip", "10.0.0.1", "--main_process_port", "21007", "--max_restarts", "0"),
                *("--log_dir", f"{LOGS}/torchrun", "--tee", "3", *RANK),
            ),
        ),
        (
            Launcher.DEEPSPEED,
            (
                *("/py", "-m", "deepspeed.launcher.runner", "--hostfile", "/d/jobs/j/hostfile"),
                *("--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "21007", "t.py"),
            ),
        ),
        (Launcher.LIGHTNING, ("/py", "-u", "t.py")),
        (Launcher.FABRIC, ("/py", "-u", "t.py")),
    ],
)
def test_every_launcher_is_told_its_node_and_the_address_of_the_first(
    launcher: Launcher, expected: tuple[str, ...]
) -> None:
    assert launcher_argv.argv(part(spec("t.py", launcher=launcher)), "/py", LOGS) == expected


def test_deepspeed_and_accelerate_know_of_all_nodes() -> None:
    job = part(spec("t.py", launcher=Launcher.ACCELERATE))
    assert launcher_argv.host_file(job, PLACE) == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"
    config = json.loads(launcher_argv.accelerate_config(job))
    assert (config["num_processes"], config["num_machines"], config["machine_rank"]) == (4, 2, 1)
    assert launcher_argv.first_rank(job) == 2


@pytest.mark.parametrize(
    ("job", "env", "expected"),
    [
        ({}, {}, ("eth1", "=eth1")),
        ({}, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}, ("ib0", "=ib0")),
        ({"GLOO_SOCKET_IFNAME": "own", "NCCL_SOCKET_IFNAME": "^lo"}, {"GLOO_SOCKET_IFNAME": "ib0"}, ("own", "^lo")),
    ],
    ids=["route", "lease", "job"],
)
def test_the_ranks_listen_on_the_interface_of_the_node_unless_the_job_names_one(
    job: dict[str, str], env: dict[str, str], expected: tuple[str, str]
) -> None:
    found = launch_plan.gang_variables(part(spec("t.py", environment=job), **env), "eth1")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"], found["NODE_RANK"]) == (*expected, "1")


@pytest.mark.parametrize(
    ("launcher", "restarts", "field"),
    [(Launcher.HOROVODRUN, 0, "nodes"), (Launcher.BAGUA, 0, "nodes"), (Launcher.TORCHRUN, 2, "max_restarts")],
)
def test_what_cannot_run_on_several_nodes_is_refused(launcher: Launcher, restarts: int, field: str) -> None:
    assert usage_error(launcher, ["t.py"], restarts, 1) is None or launcher is not Launcher.TORCHRUN
    assert str(usage_error(launcher, ["t.py"], restarts, 2)).startswith(f"{field}: ")
