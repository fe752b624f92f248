"""The Hydra launcher `gpulease`: each trial of a sweep runs in a process of its own, on GPUs leased for it.

    python train.py --multirun hydra/launcher=gpulease lr=0.1,0.01,0.001 hydra.launcher.gpus_per_trial=2

The processes are those of a `gpulease.GPUExecutor`: a trial waits in the daemon's queue until it has its GPUs, sees
exactly these from the first line of its imports, and gives them back when it ends. Hydra imports this module for every
program, so what a sweep needs is imported when one is launched.
"""

import copy
import logging
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

LOG = logging.getLogger(__name__)


@dataclass
class GpuleaseLauncherConf:
    """The options under `hydra.launcher`."""

    _target_: str = "hydra_plugins.hydra_gpulease_launcher.launcher.GpuleaseLauncher"
    gpus_per_trial: int = 1
    """GPUs that each trial gets."""
    n_jobs: Optional[int] = None  # noqa: UP045 - OmegaConf reads the annotation
    """Trials that run or wait for GPUs at a time; null for as many as this host has GPUs for."""
    wait_s: Optional[float] = None  # noqa: UP045
    """How long a trial waits for its GPUs before it fails with NotNow; null to wait forever."""
    label: str = "${hydra.job.name}"
    """Shown to others who wait, and in `gpulease usage --by label`."""


ConfigStore.instance().store(group="hydra/launcher", name="gpulease", node=GpuleaseLauncherConf, provider="gpulease")


class GpuleaseLauncher(Launcher):
    """Launches the trials of a sweep. Raises DaemonUnavailable if no daemon answers.

    A trial that fails, dies or gets no GPUs fails alone: its JobReturn says so, and raises its error when the sweeper
    reads its value. Ctrl-C ends all trials, and so does the end of this process.
    """

    def __init__(self, gpus_per_trial: int, n_jobs: int | None, wait_s: float | None, label: str) -> None:
        self._gpus_per_trial = gpus_per_trial
        self._n_jobs = n_jobs
        self._wait_s = wait_s
        self._label = label

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra says what there is to run."""
        self._context = hydra_context
        self._function = task_function
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """What each trial has returned, in the order of `job_overrides`, once all have ended."""
        import cloudpickle  # noqa: PLC0415

        from gpulease import GPUExecutor  # noqa: PLC0415

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        LOG.info("Launching %d jobs, each on %d leased GPUs", len(job_overrides), self._gpus_per_trial)
        numbered = list(enumerate(job_overrides, initial_job_idx))
        sweep = cloudpickle.dumps((self._context, self._function, self._config, Singleton.get_state()))
        with GPUExecutor(
            self._n_jobs, self._gpus_per_trial, wait_s=self._wait_s, label=self._label, by_value=True
        ) as executor:
            trials = []
            for number, overrides in numbered:
                LOG.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
                trials.append(executor.submit(run_trial, sweep, number, list(overrides)))
            return [self._outcome(trial, *named) for trial, named in zip(trials, numbered, strict=True)]

    def _outcome(self, trial: Future[bytes], number: int, overrides: Sequence[str]) -> JobReturn:
        import cloudpickle  # noqa: PLC0415

        error = trial.exception()
        if error is None:
            try:
                outcome = cloudpickle.loads(trial.result())
            except Exception as unreadable:
                outcome = self._failure(unreadable, number, overrides)
        else:
            outcome = self._failure(error, number, overrides)
        if outcome.status is JobStatus.FAILED:
            LOG.error("\t#%d failed: %r", number, outcome._return_value)
        return outcome

    def _failure(self, error: BaseException, number: int, overrides: Sequence[str]) -> JobReturn:
        """What a trial returned that could not say so itself."""
        config = _trial_config(self._context, self._config, number, overrides)
        outcome = JobReturn(hydra_cfg=config, cfg=_without_hydra(config), status=JobStatus.FAILED)
        outcome.overrides = OmegaConf.to_container(config.hydra.overrides.task)
        outcome.return_value = (
            error if isinstance(error, Exception) else RuntimeError(f"The trial ended with {error!r}.")
        )
        return outcome


def run_trial(sweep: bytes, number: int, overrides: list[str]) -> bytes:
    """Run one trial in this process; its pickled JobReturn. `sweep` is what all trials have in common."""
    import cloudpickle  # noqa: PLC0415

    context, function, config, singletons = cloudpickle.loads(sweep)
    setup_globals()
    Singleton.set_state(singletons)
    outcome = run_job(
        hydra_context=context,
        task_function=function,
        config=_trial_config(context, config, number, overrides),
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    if outcome.status is JobStatus.FAILED:
        outcome.return_value = _sendable(outcome._return_value)
    return cloudpickle.dumps(outcome)


def _trial_config(context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]) -> DictConfig:
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = number
        composed.hydra.job.num = number
    return composed


def _without_hydra(config: DictConfig) -> DictConfig:
    own = copy.deepcopy(config)
    with read_write(own), open_dict(own):
        del own["hydra"]
    return own


def _sendable(error: Any) -> Exception:
    """The error with its traceback as a note, since pickling drops that; another one where it cannot be pickled."""
    import cloudpickle  # noqa: PLC0415

    told = "".join(traceback.format_exception(error)).rstrip()
    try:
        error.add_note(f"The trial's own traceback:\n{told}")
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        error = RuntimeError(f"The trial failed with an error that cannot be pickled:\n{told}")
    return error
