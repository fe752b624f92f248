"""Trials through each tool: twelve on four GPUs, and 200 on eight beside a foreign process that comes and goes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.daemon import USUAL, daemon
from tests.docs.pages import ROOT
from tests.system.hardware import Hardware
from tests.tools.sweep import ForeignProcess, Sweep, busy_ratio, granted_beside_foreign

pytestmark = pytest.mark.busy

TRIALS, GPUS = 200, 8
TRIAL_S = 20.0
"""Long beside what a grant takes on a busy machine, and short beside the whole."""
FOREIGN_STAYS_S, FOREIGN_AWAY_S = 7.0, 5.0
"""It comes to a GPU that is leased, and is alone on it after the trial."""
LEAST_BUSY_RATIO = 0.9
HEAD = """
import os, sys, gpulease, trial

trials, at_once = int(os.environ["TRIALS"]), int(os.environ["AT_ONCE"])

@gpulease.on_gpus(1)
def train(number, devices):
    trial.hold(number, devices)
    return number

"""
JOBLIB = """
from joblib import Parallel, delayed
Parallel(at_once, prefer=sys.argv[1])(delayed(train)(number) for number in range(trials))
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
list(ThreadPoolExecutor(at_once).map(train, range(trials)))
"""
FUTURES = """
if __name__ == "__main__":
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    context = multiprocessing.get_context(sys.argv[1])
    list(ProcessPoolExecutor(at_once, mp_context=context).map(train, range(trials)))
"""
POOL = """
if __name__ == "__main__":
    import multiprocessing
    multiprocessing.get_context(sys.argv[1]).Pool(at_once).map(train, range(trials), chunksize=1)
"""
OPTUNA_THREADS = """
import optuna
optuna.create_study().optimize(lambda one: train(one.number), n_trials=trials, n_jobs=at_once)
"""
OPTUNA_PROCESSES = """
import subprocess, optuna
storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("journal"))
study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)
if len(sys.argv) > 1:
    study.optimize(lambda one: train(one.number), n_trials=trials // at_once)
else:
    for process in [subprocess.Popen([sys.executable, __file__, "one"]) for _ in range(at_once)]:
        assert process.wait() == 0
"""
RAY = """
import ray
ray.init(num_cpus=at_once, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
assert ray.get([ray.remote(train).remote(number) for number in range(trials)]) == list(range(trials))
"""
DASK = """
if __name__ == "__main__":
    from distributed import Client, LocalCluster
    client = Client(LocalCluster(n_workers=2, threads_per_worker=at_once // 2, dashboard_address=None))
    client.gather(client.map(train, range(trials)))
"""
SUBMITIT = """
import submitit
from concurrent.futures import ThreadPoolExecutor
executor = submitit.LocalExecutor("jobs")
executor.update_parameters(timeout_min=20, gpus_per_node=int(os.environ["GPUS"]))
with ThreadPoolExecutor(at_once) as jobs:  # it starts every job at once, and each is a process
    assert list(jobs.map(lambda number: executor.submit(train, number).result(), range(trials))) == list(range(trials))
"""
JOBLIB_BACKEND = """
import joblib
from gpulease.integrations import joblib_backend
joblib_backend.register()
with joblib.parallel_config(backend="gpulease", n_jobs=at_once):
    joblib.Parallel()(joblib.delayed(trial.hold)(number) for number in range(trials))
"""
DASK_PLUGIN = """
if __name__ == "__main__":
    import dask
    from distributed import Client, LocalCluster
    from gpulease.integrations.dask_plugin import GpuleasePlugin
    client = Client(LocalCluster(n_workers=1, threads_per_worker=at_once, dashboard_address=None))
    client.register_plugin(GpuleasePlugin())
    with dask.annotate(executor="gpulease"):
        client.gather(client.map(trial.hold, range(trials)))
"""
SUBMITIT_JOBS = """
import submitit
executor = submitit.AutoExecutor("jobs", cluster="gpulease")
[job.result() for job in executor.map_array(trial.hold, range(trials))]
"""
HYDRA = """
import hydra
@hydra.main(version_base=None)
def main(config):
    train(config.number)
main()
"""
HYDRA_PLUGIN = HYDRA.replace("train(config.number)", "trial.hold(config.number)")
PLUGIN = ROOT / "integrations" / "hydra-gpulease-launcher"
TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dask": (DASK, ()),
    "dask-plugin": (DASK_PLUGIN, ()),
    "futures-fork": (FUTURES, ("fork",)),
    "futures-forkserver": (FUTURES, ("forkserver",)),
    "futures-spawn": (FUTURES, ("spawn",)),
    "futures-threads": (THREADS, ()),
    "hydra": (
        HYDRA_PLUGIN,
        ("-m", "hydra/launcher=gpulease", "hydra.launcher.n_jobs={at_once}", "+number=range({trials})"),
    ),
    "hydra-joblib": (
        HYDRA,
        ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs={at_once}", "+number=range({trials})"),
    ),
    "joblib-backend": (JOBLIB_BACKEND, ()),
    "joblib-processes": (JOBLIB, ("processes",)),
    "joblib-threads": (JOBLIB, ("threads",)),
    "optuna-processes": (OPTUNA_PROCESSES, ()),
    "optuna-threads": (OPTUNA_THREADS, ()),
    "pool-fork": (POOL, ("fork",)),
    "pool-forkserver": (POOL, ("forkserver",)),
    "pool-spawn": (POOL, ("spawn",)),
    "ray": (RAY, ()),
    "submitit": (SUBMITIT, ()),
    "submitit-jobs": (SUBMITIT_JOBS, ()),
}
"""The script of each tool and its arguments. More trials run at once than there are GPUs, so that some always wait."""
IN_SLOW_LANE = {"joblib-processes", "joblib-threads", "futures-fork"}
MANY = (
    "hydra",
    "hydra-joblib",
    "joblib-processes",
    "optuna-processes",
    "optuna-threads",
    "ray",
    "submitit",
    "submitit-jobs",
)


def start(sweep: Sweep, tool: str, trials: int, at_once: int, gpus: int, **environment: str) -> subprocess.Popen[str]:
    script, arguments = TOOLS[tool]
    words = [word.format(trials=trials, at_once=at_once) for word in arguments]
    numbers = {"TRIALS": str(trials), "AT_ONCE": str(at_once), "GPUS": str(gpus)}
    numbers |= {"PYTHONPATH": f"{PLUGIN}:{Path(__file__).parent}"}
    return sweep.start(HEAD + script, *words, **numbers, **environment)


@pytest.mark.parametrize(
    "tool", [pytest.param(tool, marks=pytest.mark.slow if tool in IN_SLOW_LANE else pytest.mark.soak) for tool in TOOLS]
)
def test_six_workers_on_four_gpus_never_share_one_and_none_starves(sweep: Sweep, tool: str) -> None:
    sweep.wait(start(sweep, tool, trials=12, at_once=6, gpus=4))
    sweep.check(12)


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    return Hardware(tmp_path / "gpus.json", GPUS)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tool", MANY)
def test_all_trials_end_and_none_shares_a_gpu_and_the_gpus_are_busy(
    hardware: Hardware, tmp_path: Path, tool: str
) -> None:
    with daemon(tmp_path, "--simulate", str(hardware.path), **USUAL) as running:
        sweep = Sweep(running, tmp_path)
        with ForeignProcess(hardware, stays_s=FOREIGN_STAYS_S, away_s=FOREIGN_AWAY_S) as foreign:
            process = start(sweep, tool, TRIALS, at_once=10, gpus=GPUS, TRIAL_S=str(TRIAL_S), GPULEASE_WAIT_S="900")
            sweep.wait(process, timeout_s=1200)
        sweep.check(TRIALS, at_once=GPUS)
        log = sweep.events()
    assert granted_beside_foreign(log, foreign.stays) == []
    busy = busy_ratio(log, hardware.uuids, foreign.stays)
    print(f"{tool}: GPUs busy {busy:.1%}, a foreign process came {len(foreign.stays)} times")
    assert busy > LEAST_BUSY_RATIO
