"""The Snakemake executor `gpulease`: jobs that need GPUs become jobs of the daemon.

    snakemake --executor gpulease --jobs 8

A rule says how many GPUs its jobs need with `resources: gpu=2`, as it does for other executors. Such a job waits in the
daemon's queue with everyone else's, and sees exactly its GPUs. Jobs of all other rules run on this host at once, and
see no GPU.
"""

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from gpulease import Client, DaemonUnavailable, GpuleaseError, Job, JobRequest, Unavailable, submitter

LOG = logging.getLogger("gpulease")
POLL_S = 0.5
"""How often Snakemake asks what became of its jobs; `--max-status-checks-per-second` bounds it, too."""
GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL of a job on this host."""
SHOWN_LINES = 20
"""How much of a failed job's log is shown."""

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    # A job has this program's environment. In its command, other users could read it.
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
)


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """The options of the command line, which begin with `--gpulease-`."""

    gpus: int = field(
        default=0,
        metadata={"help": "GPUs of each job whose rule has no resource gpu; 0 runs it on this host without GPUs."},
    )
    node: Optional[str] = field(  # noqa: UP045 - Snakemake reads the annotation
        default=None,
        metadata={
            "help": "The node on which jobs with GPUs run; by default any, all of which must see this directory."
        },
    )


class Executor(RemoteExecutor):
    """Runs the jobs of a workflow. Raises WorkflowError if no daemon answers at its start."""

    def __post_init__(self) -> None:
        """Connect to the daemon."""
        self.next_seconds_between_status_checks = POLL_S
        self._settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        self._running: dict[JobExecutorInterface, SubmittedJobInfo] = {}
        self._client = Client()
        try:
            self._client.nodes()
        except GpuleaseError as error:
            raise WorkflowError(f"gpulease: {error}") from error

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submit a job to the daemon, or start it here if it needs no GPU."""
        command = ["bash", "-c", self.format_job_exec(job)]
        submitted = SubmittedJobInfo(job)
        try:
            gpus = self._gpus(job)
            if gpus:
                submitted.external_jobid = self._client.submit(self._request(job, gpus, command)).id
            else:
                submitted.aux = self._start(job, command)
        except (GpuleaseError, OSError, TypeError, ValueError) as error:
            self.report_job_error(submitted, msg=f"gpulease: {error}\n")
            return
        self._running[job] = submitted
        self.report_job_submission(submitted)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report the jobs that have ended, and yield the others."""
        for submitted in active_jobs:
            async with self.status_rate_limiter:
                ended, why = await asyncio.to_thread(self._outcome, submitted)
            if not ended:
                yield submitted
                continue
            self._running.pop(submitted.job, None)
            if why is None:
                self.report_job_success(submitted)
            else:
                self.report_job_error(submitted, msg=why)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel jobs with GPUs, and end those on this host.

        Not only `active_jobs`: Snakemake leaves out those whose state is looked up at the moment.
        """
        running = list(self._running.values())
        processes = [submitted.aux["process"] for submitted in running if submitted.aux]
        for process in processes:
            _signal(process, signal.SIGTERM)
        for submitted in running:
            if submitted.external_jobid is not None:
                try:
                    self._client.cancel_job(submitted.external_jobid)
                except GpuleaseError as error:
                    LOG.warning("gpulease: %s was not cancelled: %s", submitted.external_jobid, error)
        for process in processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()

    def _gpus(self, job: JobExecutorInterface) -> int:
        gpus = job.resources.get("gpu", self._settings.gpus)
        if not isinstance(gpus, int) or gpus < 0:
            raise ValueError(f"resources: gpu={gpus!r} is not a number of GPUs. Write gpu=1, or leave it out.")
        return gpus

    def _request(self, job: JobExecutorInterface, gpus: int, command: list[str]) -> JobRequest:
        minutes = job.resources.get("runtime")
        return JobRequest(
            command=command,
            launcher="plain",
            gpus=gpus,
            gpu_model=job.resources.get("gpu_model"),
            node=self._settings.node,
            name=f"snakemake {job.name}",
            timeout_s=60.0 * minutes if isinstance(minutes, int) and minutes > 0 else None,
            **submitter.job_fields(self.envvars()),
        )

    def _start(self, job: JobExecutorInterface, command: list[str]) -> dict[str, Any]:
        log = Path(".snakemake", "gpulease_logs", f"{job.name}-{job.jobid}-{job.attempt}.log").absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=os.environ | self.envvars() | {"CUDA_VISIBLE_DEVICES": ""}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return {"process": process, "log": log}

    def _outcome(self, submitted: SubmittedJobInfo) -> tuple[bool, str | None]:
        """Whether a job has ended, and if it has failed why."""
        if submitted.aux:
            code = submitted.aux["process"].poll()
            log = submitted.aux["log"]
            return code is not None, f"It exited with code {code}. {_tail(log)}" if code else None
        try:
            job = self._client.job(submitted.external_jobid)
        except (DaemonUnavailable, Unavailable):  # the job goes on
            return False, None
        except GpuleaseError as error:
            return True, f"gpulease: {error}\n"
        return job.ended, None if job.state == "succeeded" or not job.ended else self._failure(job)

    def _failure(self, job: Job) -> str:
        try:
            lines = "".join(self._client.job_logs(job.id, tail=SHOWN_LINES))
        except GpuleaseError as error:
            lines = str(error)
        why = job.reason or f"exit code {job.exit_code}"
        return f"{job.id} {job.state}: {why}. The end of `gpulease logs {job.id}`:\n{lines}\n"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return f"The end of {log}:\n" + "\n".join(lines) + "\n"


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
