"""The program `gpulease-wrap`: the interface of lease wrappers such as finetuning-scheduler's, over `gpulease run`.

Such scripts call one executable (`GPU_LEASE_CMD`) as `CMD [--timeout S] [--project LABEL] [--cpu-heavy] -- COMMAND` and
expect that it waits, exits with 75 when the wait has ended, and exports GPU_LEASE_HELD=NAME:PID, a process that lives
as long as the lease. `--hold` keeps a lease beyond one command, in a process of its own, until `--release`.

The holder keeps its pidfile open under flock(2). So a pid in a pidfile without a lock is no one's, and
is never sent a signal.

| what happens | what follows |
|---|---|
| the holder is killed, or the machine restarts | the lease ends with it, and the lock is gone |
| who started the holder is killed while it waits | the holder ends at the grant, and gives the GPUs back |
| the lease is lost: revoked, or no daemon for too long | the holder ends; its pidfile is removed |
| a second `--hold` with the pidfile of a living holder | it is refused, and nothing is asked for |
| `--release` where no holder lives | it says so, and exits with 0 |
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from gpulease_cli import output
from gpulease_cli.help_format import ARGUMENTS_LAST, command
from gpulease_cli.option_types import DURATION
from gpulease_cli.parameters import argument, option
from gpulease_protocol.errors import GpuleaseError, InUse, NotNow
from gpulease_protocol.states import Priority, TopologyMode

HELD = "GPU_LEASE_HELD"
"""Set for the command, so that a wrapper below it does not ask again."""
END_S, POLL_S = 30.0, 0.05
"""How long `--release` waits for the holder to end, and how often it looks."""
FOREVER = math.inf


@command(
    "gpulease-wrap",
    context_settings=ARGUMENTS_LAST,
    examples=(
        "gpulease-wrap --timeout 3600 --project my-suite -- pytest tests/gpu",
        "gpulease-wrap --hold --pidfile gpu.pid --project ci; gpulease-wrap --release --pidfile gpu.pid",
    ),
)
@argument("words", nargs=-1, metavar="[COMMAND]...", help="Command to run on the leased GPUs, after `--`.")
@option(
    "--timeout",
    type=DURATION,
    metavar="S",
    default=FOREVER,
    show_default="none",
    help="Stop waiting after this time: exit 75.",
)
@option("--project", metavar="LABEL", default="", help="Shown to users who wait for these GPUs.")
@option("--gpus", metavar="N|all", default="all", help="Number of GPUs; `all` is every GPU of a node.")
@option("--cpu-heavy", is_flag=True, help="Accepted, with a warning that gpulease does not lease CPUs.")
@option("--status", is_flag=True, help="Show who holds what, as `gpulease status`.")
@option("--doctor", is_flag=True, help="Look for problems, as `gpulease doctor`.")
@option("--hold", is_flag=True, help="Hold the GPUs in the background until --release; needs --pidfile.")
@option("--release", is_flag=True, help="End the holder of --pidfile and free its GPUs.")
@option("--pidfile", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File of the holder's pid.")
def wrap(
    words: tuple[str, ...],
    timeout: float,
    project: str,
    gpus: str,
    cpu_heavy: bool,
    status: bool,
    doctor: bool,
    hold: bool,
    release: bool,
    pidfile: Path | None,
) -> int:
    """Run a command under a GPU lease, as wrapper scripts call it. Waits until the GPUs are free.

    GPU_LEASE_CMD=$(command -v gpulease-wrap) makes such a script use it. Exits as `gpulease run`: with the command's
    code, or 75 when --timeout has passed.
    """
    modes = [bool(words), status, doctor, hold, release]
    if sum(modes) != 1:
        raise click.UsageError("give a command after --, or one of --status, --doctor, --hold, --release")
    if (hold or release) is (pidfile is None):
        raise click.UsageError("--hold and --release need --pidfile, and it needs one of them")
    if status or doctor:
        return _look("status" if status else "doctor")
    if release:
        return _release(pidfile or Path())
    if cpu_heavy:
        _say("--cpu-heavy: gpulease leases only GPUs; other programs may use the CPUs meanwhile")
    asked = _request(timeout, project, gpus)
    if hold:
        return _hold(pidfile or Path(), asked)
    return _run(words, asked)


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code, with which `eval "$(gpulease-wrap --hold ...)"` fails too."""
    from gpulease_cli import failures  # noqa: PLC0415 - as the program gpulease

    words = list(sys.argv[1:] if arguments is None else arguments)
    holds = "--hold" in words
    try:
        with wrap.make_context("gpulease-wrap", list(words)) as context:
            holds = context.params["hold"]
            code = wrap.invoke(context) or output.DONE
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except (click.ClickException, GpuleaseError) as error:
        code = failures.report(error)
    except KeyboardInterrupt:
        code = 130
    if holds and code:
        output.fail_in_shell(code)
    return int(code)


def _request(timeout: float, project: str, gpus: str) -> dict[str, Any]:
    """The options of `run` for this request."""
    if gpus != "all" and not gpus.isdecimal():
        raise click.UsageError(f"--gpus: {gpus!r} is neither a number nor all")
    return {
        "devices": -1 if gpus == "all" else int(gpus),
        "wait": timeout,
        "label": project,
        "ttl": 60.0,
        "model": None,
        "node": None,
        "mask": None,
        "topology": TopologyMode.PREFERRED,
        "priority": Priority.NORMAL,
        "preemptible": False,
        "time": None,
        "reclaim_idle_after": None,
        "new": False,
        "quiet": False,
    }


def _run(words: tuple[str, ...], asked: dict[str, Any]) -> int:
    from gpulease_cli.commands.run import check_command, run_leased  # noqa: PLC0415 - for this mode only

    code = check_command(words)
    if code is not None:
        return code
    return run_leased(list(words), None, False, "the command", {HELD: lambda _: _held()}, asked)


def _held() -> str:
    return f"gpulease:{os.getpid()}"


def _look(what: str) -> int:
    from gpulease_cli import main as gpulease  # noqa: PLC0415 - for this mode only

    code = gpulease([what])
    _, colon, pid = os.environ.get(HELD, "").rpartition(":")
    if what == "doctor" and colon and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
        _say(f"{HELD}={os.environ[HELD]} is stale: process {pid} has ended; unset {HELD}")
        return code or output.REFUSED
    return code


def _hold(pidfile: Path, asked: dict[str, Any]) -> int:
    """Start a holder and wait until it has the GPUs; its exit code where it could not get them."""
    descriptor = os.open(pidfile, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _lock(descriptor):
        holder = _pid(descriptor)
        why = f"process {holder} holds GPUs" if holder else "another process waits for GPUs"
        output.print_error("refused", f"{why} for {pidfile}", "--release it first, or name another --pidfile")
        return output.REFUSED
    os.ftruncate(descriptor, 0)
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(reader)
        os._exit(_guarded_holder(descriptor, pidfile, writer, asked))
    os.close(writer)
    os.close(descriptor)
    try:
        with open(reader, encoding="utf-8") as ready:
            exports = ready.read()
    except KeyboardInterrupt:
        os.kill(holder, signal.SIGTERM)
        raise
    if not exports:
        return os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) or output.REFUSED
    sys.stdout.write(exports)
    sys.stdout.flush()
    return output.DONE


def _guarded_holder(descriptor: int, pidfile: Path, writer: int, asked: dict[str, Any]) -> int:
    """The life of the holder, in a process and a session of its own. Its exit code; raises nothing."""
    from gpulease_cli.commands import run  # noqa: PLC0415 - for this mode only

    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # `$(...)` waits for everyone who has its output open
    code = run.FAILED
    try:
        code = _be_holder(descriptor, writer, nothing, asked)
    except GpuleaseError as error:
        output.print_gpulease_error(error)
        code = run.NOT_NOW if isinstance(error, NotNow) else run.FAILED
    except (SystemExit, BrokenPipeError):
        code = 0
    finally:
        with suppress(OSError):
            pidfile.unlink()
    return code


def _be_holder(descriptor: int, writer: int, nothing: int, asked: dict[str, Any]) -> int:
    import shlex  # noqa: PLC0415 - for this mode only

    from gpulease.own_node import node_to_ask_for  # noqa: PLC0415
    from gpulease_cli import caller_mask, wait_progress  # noqa: PLC0415
    from gpulease_cli.surrounding_lease import surrounding_lease  # noqa: PLC0415
    from gpulease_protocol.launchers import lease_variables  # noqa: PLC0415

    connected = wait_progress.patient_client(asked["wait"])
    with connected as client, wait_progress.QueueProgress(client) as progress:
        around = surrounding_lease(client)
        if around is not None:
            raise InUse(f"This shell has {around.id} already.", remedy="Give it back first, or run what needs it here.")
        node = node_to_ask_for(client, None, must_be_here=True)
        with client.lease(
            devices=asked["devices"],
            node=node,
            among=caller_mask.among(client, 1, asked["devices"], node, quiet=False),
            wait_s=asked["wait"],
            ttl_s=asked["ttl"],
            label=asked["label"],
            on_queued=progress.start,
        ) as lease:
            progress.close()
            os.write(descriptor, f"{os.getpid()}\n".encode())
            values = lease_variables(lease.env) | {HELD: _held()}
            text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
            os.write(writer, text.encode())  # a BrokenPipeError: who asked has gone
            os.close(writer)
            os.dup2(nothing, 2)
            lease.lost.wait()
    return output.LOST


def _release(pidfile: Path) -> int:
    try:
        descriptor = os.open(pidfile, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = -1
    if descriptor < 0 or _lock(descriptor):
        with suppress(FileNotFoundError):
            pidfile.unlink()
        _say(f"nothing to release: no one holds GPUs for {pidfile}")
        return output.DONE
    pid = _pid(descriptor)
    if pid is None:
        output.print_error("refused", f"the holder of {pidfile} still waits for its GPUs", "interrupt its --hold")
        return output.REFUSED
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while not _lock(descriptor):
        if time.monotonic() > deadline:
            output.print_error("refused", f"process {pid} does not end", f"kill -9 {pid}; its GPUs are freed then")
            return output.REFUSED
        time.sleep(POLL_S)
    _say(f"released the GPUs that process {pid} held")
    return output.DONE


def _lock(descriptor: int) -> bool:
    """True if no living holder has this pidfile open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid(descriptor: int) -> int | None:
    """The holder's pid; None while it waits."""
    text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else None


def _say(text: str) -> None:
    output.say(f"gpulease-wrap: {text}\n")
