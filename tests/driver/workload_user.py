"""The users of a workload: each requests GPUs, trains on them and ends in its own way.

Run as `python -m tests.driver.workload_user URL PLAN DIRECTORY` in the machine's environment. PLAN is a file with a
JSON list of `Use`s. Each user is a process, under a uid of its own if this process is root, and logs every answer with
its time to a file in DIRECTORY.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease import Client
from gpulease_protocol.errors import GpuleaseError, NotNow
from gpulease_protocol.requests import JobRequest

AGAIN_S = 0.5
"""How soon a user who was refused asks again."""
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One lease or job of one user."""

    at_s: float
    """When they request, in seconds from the start."""
    uid: int
    """Their uid."""
    label: str = ""
    """Label of the lease."""
    count: int = 1
    """Number of GPUs."""
    waits: bool = True
    """Whether they queue; if not, they retry when refused."""
    hold_s: float = 1.0
    """How long they train, in seconds."""
    ends: str = "exit"
    """`exit`: the training ends, then the lease is released; `kill`: the training is killed first; `die`: the holder is
    killed; `nothing`: nothing is ever started; `job`: a job instead of a lease; `cancel`: a job that is canceled."""
    options: tuple[str, ...] = ()
    """Options of the training; see training.c."""
    masked: bool = True
    """Whether the training sees only its own GPUs; else it sees all, and uses its first."""


def become(uid: int) -> None:
    """Become that user, if this process may."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def use(url: str, program: str, mine: Use, say: Callable[..., None]) -> None:
    """Request GPUs, train and end."""
    with Client(url) as client:
        if mine.ends in ("job", "cancel"):
            return run_job(client, program, mine, say)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            say(asks=True)
            try:
                wait_s = math.inf if mine.waits else 0.0
                lease = client.lease(count=mine.count, wait_s=wait_s, ttl_s=30, label=mine.label)
                break
            except NotNow as refused:
                say(refused=str(refused), why=str(refused.extra.get("explanation")))
                if time.monotonic() > until_s:
                    raise
                time.sleep(AGAIN_S)
        say(got=lease.id, gpus=[gpu.uuid for gpu in lease.gpus])
        if mine.ends != "nothing":
            train(program, mine, lease.environ(), say)
        say(releasing=lease.id)
        lease.release()
        say(released=lease.id)
        return None


def train(program: str, mine: Use, environment: dict[str, str], say: Callable[..., None]) -> None:
    """Run a training under a lease until its end."""
    options = [*mine.options, *(["-h", str(mine.hold_s)] if mine.ends == "exit" else [])]
    if mine.ends == "die":
        options += ["-h", str(mine.hold_s + 2)]
    if not mine.masked:
        options += ["-g", environment.pop("CUDA_VISIBLE_DEVICES").partition(",")[0]]
    with subprocess.Popen(
        [program, *options], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert training.stdout is not None
        say(trains=training.stdout.readline().strip(), pid=training.pid)
        if mine.ends == "exit":
            training.wait()
        else:
            time.sleep(mine.hold_s)
        if mine.ends == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        training.kill()


def run_job(client: Client, program: str, mine: Use, say: Callable[..., None]) -> None:
    """The same as a job with 2 ranks or more."""
    command = [program, "-r", *mine.options, "-h", str(mine.hold_s)]
    job = client.submit(JobRequest(command=command, gpus=mine.count, launcher="plain", name=mine.label))
    say(submitted=job.id)
    if mine.ends == "cancel":
        while client.job(job.id).state in ("queued", "starting"):
            time.sleep(AGAIN_S)
        time.sleep(mine.hold_s / 2)
        with suppress(GpuleaseError):  # it may have ended meanwhile
            client.cancel_job(job.id, grace_s=1.0)
    ended = client.wait_job(job.id, math.inf)
    say(job=job.id, ended=str(ended.state), reason=ended.reason, code=ended.exit_code)


def main() -> int:
    """Fork a process for each use at its time. Returns how many failed."""
    url, plan, directory = sys.argv[1:]
    program = f"{os.environ['LD_LIBRARY_PATH']}/training"
    uses = [Use(**{**one, "options": tuple(one["options"])}) for one in json.loads(Path(plan).read_text())]
    with Client(url) as first:
        first.ready()  # import what the children need, which may not read this file system
    begun_s, pids = time.monotonic(), {}
    for number, mine in enumerate(sorted(uses, key=lambda one: one.at_s)):
        time.sleep(max(0.0, begun_s + mine.at_s - time.monotonic()))
        pid = os.fork()
        if pid:
            pids[pid] = mine
            continue
        code = 1
        try:
            with (Path(directory) / f"{number}.jsonl").open("w") as log:

                def say(**what: object) -> None:
                    log.write(json.dumps({"at_s": time.monotonic(), **what}) + "\n")
                    log.flush()

                become(mine.uid)
                use(url, program, mine, say)
            code = 0
        except BaseException as error:
            print(f"{mine}: {error!r}", file=sys.stderr, flush=True)
        os._exit(code)
    wrong = 0
    for pid, mine in pids.items():
        status = os.waitpid(pid, 0)[1]
        wrong += status != (signal.SIGKILL if mine.ends == "die" else 0)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
