"""People who use the machine: each asks for GPUs, trains on them, and ends in their own way.

Run as `python -m tests.driver.holder URL PLAN DIRECTORY` in the machine's environment. PLAN is a file with a JSON list
of `Use`s. Each is a process of its own, of its own user where this one is root, and writes what it was told, and when,
into a file of its own in DIRECTORY.
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
from gpulease.errors import GpuleaseError, NotNow
from gpulease.wire import JobRequest

AGAIN_S = 0.5
"""How soon somebody who was refused asks again."""
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One lease or job of one person."""

    at_s: float
    """When they ask, from the beginning on."""
    uid: int
    """Who they are."""
    label: str = ""
    """What they call themselves."""
    count: int = 1
    """How many GPUs."""
    waits: bool = True
    """They queue; else they ask again when they are refused."""
    hold_s: float = 1.0
    """How long they train."""
    ends: str = "exit"
    """`exit`: the training ends, then the lease is given back; `kill`: the training is killed first; `die`: who holds
    the lease is killed; `nothing`: they never start anything; `job`: all of it is a job; `cancel`: a cancelled one."""
    options: tuple[str, ...] = ()
    """Of the training, see training.c."""
    masked: bool = True
    """The training sees only its own GPUs; else all of them, and uses its first."""


def become(uid: int) -> None:
    """Be that user, as far as this one may."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def use(url: str, program: str, mine: Use, say: Callable[..., None]) -> None:
    """Ask, train, end."""
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
    """A training under a lease, until its end."""
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
    """The same as a job of two ranks or more."""
    command = [program, "-r", *mine.options, "-h", str(mine.hold_s)]
    job = client.submit(JobRequest(command=command, gpus=mine.count, launcher="plain", name=mine.label))
    say(submitted=job.id)
    if mine.ends == "cancel":
        while client.job(job.id).state in ("queued", "starting"):
            time.sleep(AGAIN_S)
        time.sleep(mine.hold_s / 2)
        with suppress(GpuleaseError):  # it may have ended in the meantime
            client.cancel_job(job.id, grace_s=1.0)
    ended = client.wait_job(job.id, math.inf)
    say(job=job.id, ended=str(ended.state), reason=ended.reason, code=ended.exit_code)


def main() -> int:
    """Fork a process for each use at its time; how many of them failed."""
    url, plan, directory = sys.argv[1:]
    program = f"{os.environ['LD_LIBRARY_PATH']}/training"
    uses = [Use(**{**one, "options": tuple(one["options"])}) for one in json.loads(Path(plan).read_text())]
    with Client(url) as first:
        first.ready()  # imports what the children, who may not read this file system, will need
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
