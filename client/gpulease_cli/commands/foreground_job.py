"""`gpulease run --nodes`: a job on several nodes in the foreground.

A command that is typed can only be started here, so the other nodes get it as a job: `run` submits it, shows the output
of all nodes as it comes, and ends with its exit code. The job lives no longer than this program:

| what happens | what ends the job |
|---|---|
| Ctrl-C, SIGTERM, SIGHUP | this program cancels it, and shows the rest of its output; a second one leaves it no time |
| this program is killed, or fails | its guard, another process, cancels it: at once, or within GUARD_S when a daemon \
takes that |
| this program and its guard are killed, or their host goes | nothing: it ends by itself, or by `gpulease cancel` |
| the daemon is away | nothing: this program waits for it as any client does, then the guard does |
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from gpulease import submitter
from gpulease.client import Client
from gpulease.device_reuse import LEASE_VARIABLE
from gpulease.own_node import ANY_NODE
from gpulease_cli import output, submitted_command, wait_progress
from gpulease_cli.commands.jobs import exit_code, print_log
from gpulease_cli.options import checked
from gpulease_protocol import endpoints
from gpulease_protocol.errors import (
    GpuleaseError,
    InvalidRequest,
    NeverFits,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    NotNow,
)
from gpulease_protocol.launchers import choose_launcher, choose_mask
from gpulease_protocol.model import Job, JobState, Launcher
from gpulease_protocol.requests import JobRequest

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for the job after a signal to this program."""
GUARD_S = 600.0
"""How long the guard tries to cancel a job while no daemon takes that."""
RETRY_S = 2.0
"""Pause between two of its attempts."""
START_S = 10.0
"""How long a job that is not to wait may take to get its GPUs: their nodes are asked for readings first."""
SUBMITTING, ENDED = "submitting", "ended"
"""What the guard is told, before and after the id of the job: the request is being sent, and the job has ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """A process that cancels the job when this one ends before it. Make it while there are no threads."""

    def __init__(self, request: JobRequest, key: str) -> None:
        reader, self._writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            try:
                os.close(self._writer)
                _guard(reader, request, key)
            finally:
                os._exit(0)
        os.close(reader)

    def tell(self, word: str) -> None:
        """Tell it what has happened."""
        with suppress(BrokenPipeError):
            os.write(self._writer, f"{word}\n".encode())


def _guard(reader: int, request: JobRequest, key: str) -> None:
    """The guard: wait for the end of `run`, and cancel the job unless it has ended."""
    for number in (*SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C reaches it too
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # who reads the output must not wait for this process
        os.dup2(nothing, descriptor)
    with open(reader, encoding="ascii") as words:
        said = words.read().split()
    if SUBMITTING not in said or ENDED in said:
        return
    ids = [word for word in said if word != SUBMITTING]
    until_s = time.monotonic() + GUARD_S
    while time.monotonic() < until_s:
        try:
            with Client() as client:
                # Without an id it is the job that was submitted with this key, or one that ends before it can start.
                job_id = ids[0] if ids else client.send(endpoints.submit(request, key)).id
                client.cancel_job(job_id, GRACE_S)
            return
        except (InvalidRequest, NotAllowed, NotAuthenticated, NotFound):
            return
        except GpuleaseError:  # no daemon answers, or it has too much to do
            time.sleep(RETRY_S)


def request_for(
    words: Sequence[str], gpus: int, nodes: int, launcher: Launcher | None, options: Mapping[str, Any]
) -> JobRequest:
    """The job for a command; `options`: those of `run`. Raises InvalidRequest for what several nodes cannot have."""
    lease = os.environ.get(LEASE_VARIABLE)
    if options["devices"] is not None:
        raise InvalidRequest("--devices: names GPUs of one node.", remedy="Say with -n how many of each node.")
    if options["node"] not in (None, ANY_NODE):
        raise InvalidRequest("--node: --nodes takes nodes that are free.", remedy="Leave one of the two out.")
    if lease and not options["new"]:
        raise InvalidRequest(
            f"--nodes: this shell has {lease}, and several nodes need a lease of their own.",
            remedy="Lease others with --new, or leave --nodes out.",
        )
    fields = submitter.job_fields()
    command = submitted_command.startable(words, launcher, Path.cwd(), fields["environment"].get("PATH"))
    launcher = launcher or choose_launcher(command)
    mask = options["mask"]
    return checked(
        lambda: JobRequest(
            command=command,
            gpus=gpus,
            nodes=nodes,
            launcher=launcher.value,
            name=options["label"],
            gpu_model=options["model"],
            topology=options["topology"].value,
            priority=options["priority"].value,
            preemptible=options["preemptible"] or None,
            timeout_s=options["time"],
            reclaim_idle_after_s=options["reclaim_idle_after"],
            interpreter=submitted_command.interpreter(None, launcher, mask or choose_mask(launcher, command)),
            mask=None if mask is None else mask.value,
            **fields,
        )
    )


def run(request: JobRequest, wait_s: float, *, tell: bool) -> int:
    """Run a job to its end; its exit code, or 128 + N where signal N ended it before it had one. `tell`: say where it
    runs. Raises NotNow when it did not get its GPUs within `wait_s`, and NeverFits."""
    key = uuid.uuid4().hex
    guard = Guard(request, key)
    with Client() as client:
        if client.destination.local:
            _require_startable(request)
        if wait_s == 0:
            _require_free(client, request)
        guard.tell(SUBMITTING)
        job = client.send(endpoints.submit(request, key))
        guard.tell(job.id)
        with _SignalsCancel(job.id) as signals:
            job = _started(client, job, wait_s)
            if tell and job.members:
                nodes = ", ".join(one.node for one in job.members)
                output.say(f"gpulease: {job.id} on {nodes}, until it ends\n")
            if job.started_at is not None:
                print_log(client, job, follow=True)
            job = client.wait_job(job.id)
    guard.tell(ENDED)
    code = exit_code(job)
    return 128 + signals.number if signals.number and job.exit_code is None else code


def _require_startable(request: JobRequest) -> None:
    """Raise NotFound for a command that could not start, as far as this shell sees."""
    command, launcher, environment = request.command, request.effective_launcher, request.environment
    missing = submitted_command.not_found(command, launcher, Path.cwd(), environment)
    problem = missing or submitted_command.launcher_missing(launcher, command, request.interpreter, environment)
    if problem is not None:
        raise NotFound(problem[0], remedy=problem[1])


def _require_free(client: Client, request: JobRequest) -> None:
    """Raise NotNow or NeverFits for a job that could not start now; nothing is submitted."""
    found = client.explain_request(request)
    if found.verdict == "never":
        raise NeverFits(found.sentence, remedy="Ask for fewer or other GPUs: gpulease status lists them.")
    if found.verdict == "not_now":
        raise NotNow(found.sentence, remedy="Wait in the queue with --wait 10m, or try again later.")


def _started(client: Client, job: Job, wait_s: float) -> Job:
    """The job once it runs or has ended. Cancels it and raises NotNow if it still waits for its GPUs then."""
    until_s = time.monotonic() + (wait_s or START_S)
    job = wait_progress.wait_for_job(
        client, job.id, lambda job: job.state is not JobState.QUEUED or time.monotonic() >= until_s
    )
    if job.state is JobState.QUEUED:
        why = client.explain(job.lease_id)
        job = client.cancel_job(job.id, GRACE_S)
        if job.state is JobState.CANCELLED:
            raise NotNow(why.sentence, remedy="Wait longer with --wait 10m, or queue it: gpulease submit.")
    return wait_progress.wait_for_job(
        client, job.id, lambda job: job.ended or job.state not in (JobState.QUEUED, JobState.STARTING)
    )


class _SignalsCancel:
    """As a context: signals cancel the job; the second one leaves it no time, the third ends this program."""

    def __init__(self, job_id: str) -> None:
        self.number = 0
        """The first signal that came."""
        self._job_id = job_id
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: action for number, action in before.items() if action is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.number = self.number or number
        if self._count > 2:
            raise KeyboardInterrupt
        grace_s = GRACE_S if self._count == 1 else 0.0
        how = f"it has {GRACE_S:g} s to end" if grace_s else "at once"
        output.say(f"\ngpulease: cancelling {self._job_id}, {how}\n")
        threading.Thread(target=self._cancel, args=(grace_s,), daemon=True).start()

    def _cancel(self, grace_s: float) -> None:
        try:
            with Client() as client:
                client.cancel_job(self._job_id, grace_s)
        except GpuleaseError as error:
            output.print_gpulease_error(error)
