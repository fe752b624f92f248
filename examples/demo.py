"""Three 2-GPU DDP training runs at the same time on one daemon: what `make demo` shows.

Starts `gpulease serve` in a temporary directory, submits the training runs through the REST API, prints who holds which
GPU and who waits, and checks from the daemon's event log that no GPU was ever in two leases. Without a driver that
shows at least two GPUs it runs on four simulated ones; the training runs are real either way.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from gpulease import Client, Event, Gpu, GpuleaseError, GpuState, Job, JobState, Lease
from gpulease_protocol.requests import JobRequest

TRAINING = Path(__file__).resolve().with_name("ddp_digits.py")
JOBS, GPUS_PER_JOB, SIMULATED_GPUS = 3, 2, 4
ACCURACY_WANTED = 0.95
START_WITHIN_S, TRAIN_WITHIN_S, STOP_WITHIN_S = 60.0, 600.0, 30.0
LOOK_EVERY_S = 0.2

out = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demonstration did not show what it promises; the message says which part."""


@dataclass(frozen=True)
class Daemon:
    """A daemon of the demonstration's own."""

    process: subprocess.Popen[bytes]
    client: Client
    url: str
    log: Path

    def wait_until_ready(self) -> None:
        """Return once it answers and has read its GPUs. Raises DemoFailed when it ends first or takes too long."""
        deadline = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise DemoFailed(f"the daemon ended with code {self.process.returncode}: {last_words(self.log)}")
            try:
                self.client.ready()
                if list(self.client.gpus()):
                    return
            except GpuleaseError:
                pass  # Not listening yet, or not ready: that is what is being waited for.
            time.sleep(LOOK_EVERY_S)
        raise DemoFailed(f"the daemon showed no GPU within {START_WITHIN_S:.0f} s: {last_words(self.log)}")


def main() -> int:
    """Run the demonstration; returns its exit code."""
    parser = argparse.ArgumentParser(description="Three 2-GPU DDP training runs at the same time on one daemon.")
    parser.add_argument("--simulate", metavar="N", type=int, help=f"use N simulated GPUs, {GPUS_PER_JOB} or more")
    options = parser.parse_args()
    if options.simulate is not None and options.simulate < GPUS_PER_JOB:
        parser.error(f"--simulate: must be {GPUS_PER_JOB} or more, each training takes {GPUS_PER_JOB} GPUs")
    signal.signal(signal.SIGTERM, interrupt)
    directory = temporary_directory()
    try:
        demonstrate(directory, options.simulate)
    except (DemoFailed, GpuleaseError, KeyboardInterrupt) as problem:
        out.print(f"[bold red]The demonstration failed:[/] {str(problem) or 'interrupted'}")
        out.print(f"Everything it left, logs included, is in {directory}")
        return 130 if isinstance(problem, KeyboardInterrupt) else 1
    shutil.rmtree(directory)
    return 0


def temporary_directory() -> Path:
    """A new directory; not in the usual place if a Unix socket there had too long a path (107 bytes, unix(7))."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="gpulease-demo-", dir=usual if len(usual) < 60 else "/tmp"))  # noqa: S108 - mkdtemp is safe anywhere


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Let SIGTERM clean up as Ctrl-C does."""
    raise KeyboardInterrupt


def demonstrate(directory: Path, simulate: int | None) -> None:
    """Choose the hardware, start the daemon on it, and run the training runs."""
    if simulate is None and not driver_shows_gpus():
        out.print(f"No NVIDIA driver with GPUs here: {SIMULATED_GPUS} simulated GPUs, training runs on the CPU.")
        simulate = SIMULATED_GPUS
    if simulate is None:
        with daemon(directory / "hardware", None) as real:
            count = len(list(real.client.gpus()))
            if count >= GPUS_PER_JOB:
                return run(real)
            out.print(
                f"This machine has {count} GPU and a training takes {GPUS_PER_JOB}: "
                f"{SIMULATED_GPUS} simulated GPUs instead."
            )
        simulate = SIMULATED_GPUS
    with daemon(directory / "simulated", simulate) as simulated:
        return run(simulated)


def driver_shows_gpus() -> bool:
    """Whether NVML shows a GPU. Asked in a process of its own, because a sick driver can hang its caller."""
    question = (
        "import sys; from gpulease_worker.probe.nvml_check import unavailable_reason;"
        " sys.exit(3 if unavailable_reason() else 0)"
    )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", question], timeout=20, capture_output=True, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        out.print("The NVIDIA driver did not answer within 20 s.")
        return False
    if asked.returncode not in (0, 3):
        raise DemoFailed(f"could not ask the driver for its GPUs: {asked.stderr.strip().splitlines()[-1:]}")
    return asked.returncode == 0


@contextmanager
def daemon(directory: Path, simulate: int | None) -> Iterator[Daemon]:
    """A ready daemon in this directory; it, and every job it still runs, is stopped at the end."""
    directory.mkdir(mode=0o700)
    port, log = free_port(), directory / "daemon.log"
    command = [sys.executable, "-m", "gpulease_cli", "serve", "--port", str(port), "--data-dir", str(directory)]
    command += ["--socket", str(directory / "gpulease.sock")]
    command += [] if simulate is None else ["--simulate", str(simulate)]
    with log.open("wb") as file:
        # A session of its own: Ctrl-C is for this script, which then stops jobs and daemon in that order.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    running = Daemon(process, Client(url), url, log)
    try:
        running.wait_until_ready()
        yield running
    finally:
        stop(running)


def stop(running: Daemon) -> None:
    """Cancel what still runs, then end the daemon; by force when it takes too long."""
    if running.process.poll() is not None:
        return  # It ended by itself, which its caller has reported.
    try:
        cancel_all(running.client)
    except GpuleaseError as problem:
        out.print(f"Could not cancel the training runs, they may still run: {problem}")
    running.process.terminate()
    try:
        running.process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.process.wait(STOP_WITHIN_S)
        raise DemoFailed(f"the daemon did not stop within {STOP_WITHIN_S:.0f} s and was killed") from None


def cancel_all(client: Client) -> None:
    """Cancel every job that has not ended, and wait until it has."""
    deadline = time.monotonic() + STOP_WITHIN_S
    for job in [job for job in client.jobs() if not job.state.final]:
        client.cancel_job(job.id, grace_s=5.0)
    while time.monotonic() < deadline and not all(job.state.final for job in client.jobs()):
        time.sleep(LOOK_EVERY_S)


def run(daemon: Daemon) -> None:
    """Submit the training runs at once, watch them, and judge. Raises DemoFailed when anything is not as promised."""
    client, began = daemon.client, time.monotonic()
    out.print(f"The daemon listens on {daemon.url} (try: curl {daemon.url}/)")
    jobs = [client.submit(training(number)) for number in range(1, JOBS + 1)]
    out.print(f"Submitted {JOBS} training runs, {GPUS_PER_JOB} GPUs each.\n")
    watch(client, [job.id for job in jobs], began)

    jobs = [client.job(job.id) for job in jobs]
    leases = {job.id: client.lease_by_id(job.lease_id) for job in jobs}
    views = {job.id: rank_views(client, job) for job in jobs}
    out.print(results(jobs, leases, views))
    problems = [problem for job in jobs for problem in faults(job, leases[job.id], views[job.id])]
    history = list(client.events())
    problems += overlaps(history)
    granted = sum(event.kind == "lease.granted" for event in history)
    if granted < JOBS:
        problems.append(f"the event log shows {granted} grants of {JOBS}")
    if problems:
        raise DemoFailed("; ".join(problems))
    out.print("[bold green]no GPU was ever in two leases[/]")


def training(number: int) -> JobRequest:
    """One training; each has its own seed."""
    return JobRequest(
        name=f"digits-{number}",
        command=[str(TRAINING), "--epochs", "10", "--seed", str(number), "--checkpoint-dir", "checkpoints"],
        gpus=GPUS_PER_JOB,
        interpreter=sys.executable,
    )


def watch(client: Client, ids: list[str], began: float) -> None:
    """Print who holds which GPU and who waits, at every change, until all jobs have ended."""
    shown = ""
    while time.monotonic() < began + TRAIN_WITHIN_S:
        jobs = [client.job(id) for id in ids]
        line = picture(client, jobs)
        if line != shown:
            out.print(f"{time.monotonic() - began:5.1f} s  {line}", markup=False)
            shown = line
        if all(job.state.final for job in jobs):
            out.print()
            return
        time.sleep(LOOK_EVERY_S)
    waiting = next(job for job in jobs if not job.state.final)
    raise DemoFailed(
        f"not all training runs had ended after {TRAIN_WITHIN_S:.0f} s; {waiting.name} is {waiting.state}: "
        f"{waiting.reason or client.explain(waiting.lease_id).sentence}"
    )


def picture(client: Client, jobs: Iterable[Job]) -> str:
    """One line: the GPUs with their holder, then who waits."""
    names = {job.lease_id: job.name for job in jobs}
    together: dict[str, list[int]] = {}
    for gpu in client.gpus():
        together.setdefault(what_it_does(gpu, names), []).append(gpu.index)
    parts = [f"GPU {', '.join(map(str, indices))}: {what}" for what, indices in together.items()]
    waiting = [job.name for job in jobs if job.state == JobState.QUEUED]
    return " | ".join([*parts, f"waits: {', '.join(waiting) or 'no one'}"])


def what_it_does(gpu: Gpu, names: dict[str, str]) -> str:
    """Whom a GPU is leased to, or else its state; another's lease is named by its id."""
    who = names.get(gpu.lease_id or "", f"lease {gpu.lease_id}")
    if gpu.state == GpuState.LEASED:
        return who
    return f"draining after {who}" if gpu.state == GpuState.DRAINING else gpu.state


def rank_views(client: Client, job: Job) -> list[dict[str, object]]:
    """What each rank printed of itself at its end, in order of rank."""
    views: list[dict[str, object]] = []
    for rank in range(len(job.gpus)):
        lines = "".join(client.job_logs(job.id, rank=rank)).splitlines()
        found = [line[line.index("{") :] for line in lines if '"test_accuracy"' in line]
        views += [json.loads(line) for line in found[-1:]]
    return views


def results(jobs: list[Job], leases: dict[str, Lease], views: dict[str, list[dict[str, object]]]) -> Table:
    """The table at the end, one row for each job."""
    table = Table("job", "GPUs", "seconds waited", "test accuracy", "exit code")
    for job in jobs:
        lease = leases[job.id]
        waited = f"{(lease.granted_at - lease.created_at).total_seconds():.1f}" if lease.granted_at else "not granted"
        accuracy = views[job.id][0]["test_accuracy"] if views[job.id] else None
        shown = f"{accuracy:.4f}" if isinstance(accuracy, float) else "none"
        table.add_row(job.name, ", ".join(str(gpu.index) for gpu in lease.gpus), waited, shown, str(job.exit_code))
    return table


def faults(job: Job, lease: Lease, views: list[dict[str, object]]) -> list[str]:
    """What is wrong with one training: its exit, its accuracy, or ranks that were not on their leased GPUs."""
    if job.state != JobState.SUCCEEDED or job.exit_code != 0:
        return [f"{job.name} {job.state} with exit code {job.exit_code}: {job.reason or 'no reason given'}"]
    if len(views) != GPUS_PER_JOB:
        return [f"{job.name}: {len(views)} of {GPUS_PER_JOB} ranks printed their view"]
    bound = ",".join(gpu.uuid for gpu in lease.gpus)
    wanted = {"cuda_visible_devices": bound, "world_size": GPUS_PER_JOB, "lease_id": lease.id}
    problems = [
        f"{job.name}, rank {view['rank']}: {name} is {view[name]!r}, not {value!r}"
        for view in views
        for name, value in wanted.items()
        if view[name] != value
    ]
    if any(float(str(view["test_accuracy"])) < ACCURACY_WANTED for view in views):
        problems.append(f"{job.name}: test accuracy is under {ACCURACY_WANTED}")
    return problems


def overlaps(history: Iterable[Event]) -> list[str]:
    """A sentence for each grant of a GPU that another lease still held, from the event log alone."""
    holders: dict[str, str] = {}
    found = []
    for event in sorted(history, key=lambda event: event.seq):
        lease = event.lease_id or ""
        if event.kind in ("lease.granted", "lease.revived"):
            found += [
                f"event {event.seq} gives {uuid} to lease {lease} while lease {holders[uuid]} holds it"
                for uuid in event.gpus
                if holders.get(uuid, lease) != lease
            ]
            holders.update(dict.fromkeys(event.gpus, lease))
        elif event.kind == "lease.ended":
            holders = {uuid: holder for uuid, holder in holders.items() if holder != lease}
    return found


def free_port() -> int:
    """A TCP port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def last_words(log: Path) -> str:
    """The last lines of a log, for an error message."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines[-3:]) or "its log is empty"


if __name__ == "__main__":
    sys.exit(main())
