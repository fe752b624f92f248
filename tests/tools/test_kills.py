"""A worker or a whole tool is killed: its GPUs are free within seconds, or drain and name who keeps them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.tools.sweep import FREED_WITHIN_S, TOOLS, Sweep, freed, leases_of

pytestmark = [pytest.mark.slow, pytest.mark.busy]

HOLDERS = 3
HEAD = """
import os, sys, trial
from gpulease import find_usable_cuda_devices

def hold(number):
    trial.hold(number, find_usable_cuda_devices(1), 600)

"""
MULTIPROCESSING = """
if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context(sys.argv[1])
"""
POOL = MULTIPROCESSING + "    context.Pool(3).map(hold, range(3), chunksize=1)\n"
FUTURES = MULTIPROCESSING + (
    "    from concurrent.futures import ProcessPoolExecutor\n"
    "    list(ProcessPoolExecutor(3, mp_context=context).map(hold, range(3)))\n"
)
LOKY = "from joblib import Parallel, delayed\nParallel(3)(delayed(hold)(number) for number in range(3))\n"
EXECUTOR = """
if __name__ == "__main__":
    from gpulease import GPUExecutor
    with GPUExecutor() as executor:
        list(executor.map(trial.hold, range(3), [None] * 3, [600] * 3))
"""
RAY = "import ray\nray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level='ERROR')\n"
RAY_TASKS = RAY + "ray.get([ray.remote(hold).remote(number) for number in range(3)])\n"
RAY_ACTORS = (
    RAY
    + """
@ray.remote(num_cpus=1)
class Trainer:
    def train(self, number):
        hold(number)

trainers = [Trainer.remote() for _ in range(3)]
ray.get([trainer.train.remote(number) for number, trainer in enumerate(trainers)])
"""
)
DASK = """
if __name__ == "__main__":
    from distributed import Client, LocalCluster
    client = Client(LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None))
    client.gather(client.map(hold, range(3)))
"""
SUBMITIT = """
import submitit
executor = submitit.LocalExecutor("jobs")
executor.update_parameters(timeout_min=20, gpus_per_node=4)
[job.result() for job in executor.map_array(hold, range(3))]
"""
JUPYTER = """
import threading
from jupyter_client.manager import start_new_kernel
program = open(__file__).read().partition("import threading")[0]
kernels = [start_new_kernel(kernel_name="python3") for _ in range(3)]
for number, (_, client) in enumerate(kernels):
    client.execute(program + f"hold({number})")
threading.Event().wait()
"""
HYDRA = """
import hydra
@hydra.main(version_base=None)
def main(config):
    hold(config.number)
main()
"""
SWEEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "joblib": (LOKY, ()),
    "futures-fork": (FUTURES, ("fork",)),
    "futures-spawn": (FUTURES, ("spawn",)),
    "futures-forkserver": (FUTURES, ("forkserver",)),
    "pool-fork": (POOL, ("fork",)),
    "pool-spawn": (POOL, ("spawn",)),
    "pool-forkserver": (POOL, ("forkserver",)),
    "GPUExecutor": (EXECUTOR, ()),
    "ray-tasks": (RAY_TASKS, ()),
    "ray-actors": (RAY_ACTORS, ()),
    "dask": (DASK, ()),
    "submitit": (SUBMITIT, ()),
    "jupyter": (JUPYTER, ()),
    "hydra-joblib": (HYDRA, ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=3", "+number=0,1,2")),
}
"""The script of each tool and its arguments. Its tool starts three trials, which hold a GPU each."""
IN_SLOW_LANE = {
    ("joblib", "tool"),
    ("joblib", "worker"),
    ("futures-fork", "tool"),
    ("pool-spawn", "tool"),
    ("dask", "tool"),
}


JOBS_GO_ON = {"submitit"}
"""What it has started goes on without it, as on a cluster, so that only a kill of a job frees a GPU."""


def kills() -> list[object]:
    """Each tool and what is killed; most in the soak lane, because a tool takes seconds of processor time to start."""
    cases = [(tool, victim) for tool in SWEEPS for victim in ("tool", "worker")]
    cases = [case for case in cases if case[0] not in JOBS_GO_ON or case[1] == "worker"]
    return [case if case in IN_SLOW_LANE else pytest.param(*case, marks=pytest.mark.soak) for case in cases]


@pytest.mark.parametrize(("tool", "victim"), kills())
def test_what_is_killed_frees_its_gpus_within_seconds(sweep: Sweep, tool: str, victim: str) -> None:
    script, arguments = SWEEPS[tool]
    process = sweep.start(HEAD + script, *arguments)
    try:
        trials = sweep.wait_for_trials(HOLDERS)
        leases = leases_of(sweep.running)
        assert len(leases) == HOLDERS, "each trial has a lease of its own"
        if victim == "tool":
            after = freed(sweep.running, leases, process.kill)
        else:
            own = [lease for lease in leases if trials[0].gpus == indices(sweep, lease)]
            after = freed(sweep.running, own, lambda: os.kill(trials[0].pid, signal.SIGKILL))
        print(f"{tool}, {victim} killed: {after.seconds:.1f} s {after.draining or ''}")
        assert after.seconds < FREED_WITHIN_S, after
    finally:
        process.kill()
        process.wait()
        sweep.close()


RANK = (
    HEAD
    + """
trial.hold(int(os.environ.get("RANK", 0)), find_usable_cuda_devices(2), 600)
"""
)
LIGHTNING = """
import sys, lightning, trial
from gpulease import find_usable_cuda_devices
from lightning.pytorch.demos.boring_classes import BoringModel

class Hold(lightning.Callback):
    def on_train_start(self, trainer, module):
        trial.hold(trainer.global_rank, devices, 600)

if __name__ == "__main__":
    devices = find_usable_cuda_devices(2)
    lightning.Trainer(
        accelerator="cpu", strategy=sys.argv[1], devices=2, callbacks=[Hold()], logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    ).fit(BoringModel())
else:
    devices = [0, 1]
"""
FABRIC = """
import trial
from gpulease import find_usable_cuda_devices
from lightning.fabric import Fabric
devices = find_usable_cuda_devices(2)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
trial.hold(fabric.global_rank, devices, 600)
"""
PYTHON = str(TOOLS / "python")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sweep.py")
ACCELERATE = (
    PYTHON,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--gpu_ids=all",
    "--num_processes=2",
    "sweep.py",
)
LAUNCHERS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "torchrun": (RANK, 2, TORCHRUN),
    "accelerate": (RANK, 2, ACCELERATE),
    "lightning-ddp": (LIGHTNING, 2, (PYTHON, "sweep.py", "ddp")),
    "lightning-ddp_spawn": (LIGHTNING, 2, (PYTHON, "sweep.py", "ddp_spawn")),
    "lightning-ddp_fork": (LIGHTNING, 2, (PYTHON, "sweep.py", "ddp_fork")),
    "fabric-ddp": (FABRIC, 2, (PYTHON, "sweep.py")),
    "gpulease-run": (RANK, 1, ("gpulease", "run", "-n", "2", "--", PYTHON, "sweep.py")),
    "gpulease-run-torchrun": (RANK, 2, ("gpulease", "run", "-n", "2", "--", *TORCHRUN)),
}
"""The script of each launcher, how many of its processes log a trial, and its command. All share one lease."""


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=() if name == "gpulease-run" else pytest.mark.soak) for name in LAUNCHERS]
)
def test_a_launcher_that_is_killed_frees_the_gpus_of_its_ranks(sweep: Sweep, launcher: str) -> None:
    script, ranks, command = LAUNCHERS[launcher]
    (sweep.place / "sweep.py").write_text(script)
    process = sweep.start_command(command)
    try:
        sweep.wait_for_trials(ranks)
        leases = leases_of(sweep.running)
        assert len(leases) == 1, "all ranks share one lease"
        after = freed(sweep.running, leases, process.kill)
        print(f"{launcher} killed: {after.seconds:.1f} s {after.draining or ''}")
        assert after.seconds < FREED_WITHIN_S, after
        assert leases_of(sweep.running) == [], "a rank that outlives its launcher takes no further GPUs"
    finally:
        process.kill()
        process.wait()
        sweep.close()


def indices(sweep: Sweep, lease: str) -> set[str]:
    """The GPUs of a lease."""
    return {str(gpu["index"]) for gpu in sweep.running.lease(lease)["gpus"]}
