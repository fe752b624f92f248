"""submitit executor: each function that is submitted becomes a job of the daemon, on GPUs of its own.

    executor = submitit.AutoExecutor(folder="log", cluster="gpulease")
    executor.update_parameters(gpus_per_node=2, timeout_min=60)
    job = executor.submit(train, learning_rate=0.1)
    print(job.result())

submitit finds the executor by entry points. A job outlives the program that submitted it. On the node `submitit_job`
runs its tasks, with their logs, time-outs and requeues. Function and result are files in `folder`, which the node must
see.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core import core, logger, utils
from submitit.local.local import LocalJobEnvironment

from gpulease import submitter
from gpulease.client import Client
from gpulease_protocol.errors import GpuleaseError, InvalidRequest, NotFound
from gpulease_protocol.model import Job, JobState
from gpulease_protocol.requests import JobRequest

NO_TIMEOUT_MIN = 60 * 24 * 365
"""The time of a job that names no `timeout_min`."""
SIGNAL_DELAY_S = 30
"""How long before the end of its time a task is told, so that it can save a checkpoint."""
WAIT_S = 5.0
"""How long one look at a job waits for its end."""
CANCEL_GRACE_S = 5.0
STATES = {
    JobState.QUEUED: "PENDING",
    JobState.STARTING: "RUNNING",
    JobState.RUNNING: "RUNNING",
    JobState.STOPPING: "COMPLETING",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "CANCELLED",
    JobState.TIMED_OUT: "TIMEOUT",
    JobState.LOST: "NODE_FAIL",
}
"""The words of submitit, which are Slurm's."""
OWN_PARAMETERS = {"gpu_model", "min_free_memory_bytes", "node", "setup", "signal_delay_s"}


@cache
def shared_client() -> Client:
    """The client of all jobs in this process. It is no attribute of theirs, because they are pickled."""
    return Client()


class GpuleaseStateWatcher(core.InfoWatcher):
    """Asks the daemon for the states of all jobs at once, at most every 2 s."""

    def __init__(self) -> None:
        super().__init__(delay_s=2)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """`PENDING`, `RUNNING`, `COMPLETED` and so on; `NOT_FOUND` for a job that the daemon has forgotten."""
        return str(self.get_info(job_id, mode).get("State", "UNKNOWN"))

    def update(self) -> None:
        """One list of the jobs that go on, and a look at each that has ended since the last one."""
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            going_on = {job.id: _description(job) for job in shared_client().jobs([*STATES][:4])}
            for job_id in self._registered - self._finished:
                self._info_dict[job_id] = going_on.get(job_id) or _description_of(job_id)
        except GpuleaseError as error:
            logger.get_logger().warning(f"The daemon cannot be asked for the states of jobs: {error}")
        self._finished |= {job_id for job_id in self._registered - self._finished if self.is_done(job_id, "cache")}


def _description_of(job_id: str) -> dict[str, str]:
    try:
        return _description(shared_client().job(job_id))
    except NotFound as error:
        return {"State": "NOT_FOUND", "Reason": str(error)}


def _description(job: Job) -> dict[str, str]:
    """What submitit shows of a job: all text."""
    return {
        "JobID": job.id,
        "State": STATES.get(job.state, "UNKNOWN"),
        "Reason": job.reason or "",
        "GPUs": ",".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus),
    }


class GpuleaseJob(core.Job[core.R]):
    """A job of the daemon, as submitit shows it. `job_id` is the daemon's, for `gpulease cancel` and the others."""

    watcher = GpuleaseStateWatcher()
    _results_timeout_s = 5

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; with `check=False` nothing is raised where that fails."""
        try:
            shared_client().cancel_job(self.job_id, CANCEL_GRACE_S)
        except GpuleaseError:
            if check:
                raise

    def wait(self) -> None:
        """Wait until the job has ended, which the daemon says at once. While it is away, a result counts as the end."""
        while True:
            try:
                ended = shared_client().wait_job(self.job_id, WAIT_S).ended
            except NotFound:
                ended = True
            except GpuleaseError:
                if self.done():
                    return
                time.sleep(1.0)
                continue
            if ended:
                self.get_info(mode="force")
                return

    def __del__(self) -> None:
        if self._cancel_at_deletion and not self.done():
            self.cancel(check=False)


class GpuleaseJobEnvironment(LocalJobEnvironment):
    """What a task knows of its job; `submitit_job` sets the variables. It requeues as in submitit's local executor."""

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        super()._handle_signals(paths, submission)
        signal.signal(signal.SIGTERM, _exit)  # the daemon's: the job was cancelled


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class GpuleaseExecutor(core.PicklingExecutor):
    """Submits functions as jobs. Its parameters are those of `AutoExecutor`, and `OWN_PARAMETERS`.

    `python` is the interpreter of the tasks, by default this one. `submit` raises the GpuleaseError of a refused job.
    """

    job_class = GpuleaseJob

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.parameters["timeout_min"] = NO_TIMEOUT_MIN
        self._throttling = 0.0
        self._python = sys.executable if python is None else python
        utils.JobPaths.get_first_id_independent_folder(self.folder).mkdir(parents=True, exist_ok=True)

    @classmethod
    def affinity(cls) -> int:
        """0: never chosen unless it is named."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return OWN_PARAMETERS

    def _internal_update_parameters(self, **parameters: Any) -> None:
        if parameters.get("nodes", 1) != 1:
            raise InvalidRequest("nodes: a job of this executor runs on one node.", remedy="Use nodes=1.")
        if parameters.get("gpus_per_node", 1) < 1:
            raise InvalidRequest(
                "gpus_per_node: must be 1 or more.", remedy='Use cluster="local" for what needs no GPU.'
            )
        super()._internal_update_parameters(**parameters)

    def _num_tasks(self) -> int:
        return int(self.parameters.get("tasks_per_node", 1))

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([self._python, "-u", "-m", "submitit.core._submit", str(self.folder)])

    def _submit_command(self, command: str) -> GpuleaseJob:
        job = shared_client().submit(self._job_request(command))
        return GpuleaseJob(folder=self.folder, job_id=job.id, tasks=list(range(self._num_tasks())))

    def _job_request(self, command: str) -> JobRequest:
        given = self.parameters
        run = [self._python, "-m", "gpulease.integrations.submitit_job", str(self.folder)]
        if setup := given.get("setup"):
            run = ["bash", "-c", " && ".join([*setup, f"exec {shlex.join(run)}"])]
        variables = {
            "SUBMITIT_EXECUTOR": self.name(),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(self._num_tasks()),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * given["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(given.get("signal_delay_s", SIGNAL_DELAY_S))),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1" if given.get("stderr_to_stdout") else "",
        }
        return JobRequest(
            command=run,
            launcher="plain",
            gpus=given.get("gpus_per_node", 1),
            name=given.get("name", "submitit"),
            node=given.get("node"),
            gpu_model=given.get("gpu_model"),
            min_free_memory_bytes=given.get("min_free_memory_bytes"),
            **submitter.job_fields(variables),
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError("Jobs are submitted over HTTP.")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError("Jobs are submitted over HTTP.")

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError("Jobs are submitted over HTTP.")
