"""`gpulease fleet`: workers that a cluster's scheduler carries."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Number
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.errors import GpuleaseError, InvalidRequest, NotFound
from gpulease_protocol.host.addresses import candidates, default_data_dir
from gpulease_protocol.host.logging import LogFormat, LogLevel, logging_to_stderr
from gpulease_protocol.status_table import align_columns

if TYPE_CHECKING:
    from gpulease_fleet.carrier import Carrier, Finding
    from gpulease_fleet.pool import Pool
    from gpulease_fleet.records import Records
    from gpulease_fleet.slurm_script import SlurmOptions

MAX_PILOTS = 2000
BUSY_TICK_S = 1.0
"""Time between two rounds while a pilot comes or goes."""
DOWN_S = 900.0
STATUS = "gpulease fleet slurm status"

POOL = option("--pool", metavar="NAME", default="main", show_default="main", help="Name of the pool.")
STATE_DIR = option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="GPULEASE_FLEET_DIR",
    metavar="DIR",
    show_default="fleet in your data directory",
    help="Where the records of pools are.",
)
GRES = option("--gres", metavar="TEXT", default="gpu:1", show_default="gpu:1", help="GPUs of each node, as for sbatch.")
TIME = option(
    "--time",
    metavar="TEXT",
    default="24:00:00",
    show_default="24:00:00",
    help="Time limit of each, such as 24h.",
)
SBATCH = option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="A further option for sbatch, such as --sbatch=--partition=gpu; may be given several times.",
)
SHARED = option("--shared", is_flag=True, help="Share nodes: a pilot takes its GPUs, not the whole node.")
WORKER_URL = option(
    "--worker-url", metavar="URL", show_default="GPULEASE_URL", help="Where workers on the nodes reach the daemon."
)
WORKER_OPTION = option(
    "--worker-option",
    multiple=True,
    metavar="OPTION",
    help="A further option for `gpulease worker`, such as --worker-option=--simulate=8.",
)
WORKER_DIR = option(
    "--worker-dir",
    metavar="DIR",
    show_default="~/.local/share/gpulease/fleet/POOL",
    help="Directory on the nodes for logs and jobs; it must outlive an allocation.",
)
PROGRAM = option(
    "--program",
    metavar="PATH",
    show_default="this one",
    help="The program gpulease on the nodes.",
)
TICK = option(
    "--tick", type=DURATION, metavar="DURATION", default=15.0, show_default="15s", help="Time between two rounds."
)

IDLE = option(
    "--idle",
    type=DURATION,
    metavar="DURATION",
    default=600.0,
    show_default="10m",
    help="Remove a node above --min after it has been idle for this long.",
)
LEAVE = option(
    "--leave", type=DURATION, metavar="DURATION", default=60.0, show_default="1m", help="Time for leaving a node."
)


@command(
    examples=(
        "gpulease fleet slurm up --nodes 4 --gres gpu:8 --time 24h",
        "gpulease fleet slurm up --pool night --min 0 --max 8 --idle 10m --gres gpu:8 --sbatch=--partition=gpu",
    )
)
@POOL
@option("--nodes", type=Number(int, 0, MAX_PILOTS), metavar="N", help="Fixed number of nodes.")
@option("--min", "least", type=Number(int, 0, MAX_PILOTS), metavar="N", help="Minimum number of nodes.")
@option(
    "--max", "most", type=Number(int, 0, MAX_PILOTS), metavar="N", help="Maximum number of nodes, while requests wait."
)
@IDLE
@GRES
@TIME
@SHARED
@SBATCH
@WORKER_URL
@WORKER_OPTION
@WORKER_DIR
@PROGRAM
@LEAVE
@TICK
@option("--once", is_flag=True, help="Make one round and exit, for use from cron.")
@option("--no-doctor", is_flag=True, help="Start even if `doctor` finds problems.")
@STATE_DIR
def slurm_up(
    pool: str,
    nodes: int | None,
    least: int | None,
    most: int | None,
    idle: float,
    tick: float,
    once: bool,
    no_doctor: bool,
    state_dir: Path | None,
    **engine: Any,
) -> int:
    """Keep workers running as jobs of Slurm, one for each node.

    Runs until it is stopped, which ends no pilot: the next `up` of the pool goes on with them. Needs an administrator's
    rights at the daemon, and of Slurm only sbatch, squeue and scancel.
    """
    from gpulease_fleet.slurm import SlurmCarrier  # noqa: PLC0415 - for this command alone

    options = _slurm_options(pool, **engine)
    size = size_of(nodes, least, most)
    return up(
        pool,
        SlurmCarrier(options),
        asdict(options),
        size,
        idle,
        tick,
        once=once,
        no_doctor=no_doctor,
        state_dir=state_dir,
    )


@command(examples=("gpulease fleet slurm status", "gpulease fleet slurm status --pool night --json"))
@POOL
@STATE_DIR
@JSON
def slurm_status(pool: str, state_dir: Path | None, json: bool) -> None:
    """Show a pool and its workers."""
    show_status(pool, state_dir, json)


@command(examples=("gpulease fleet slurm down --pool night",))
@POOL
@TICK
@STATE_DIR
def slurm_down(pool: str, tick: float, state_dir: Path | None) -> int:
    """End a pool: wait until its nodes have left; their jobs continue elsewhere."""
    from gpulease_fleet.slurm import SlurmCarrier  # noqa: PLC0415 - for this command alone
    from gpulease_fleet.slurm_script import SlurmOptions  # noqa: PLC0415 - the same

    def carrier(known: dict[str, Any]) -> Carrier:
        return SlurmCarrier(SlurmOptions(**known | {name: tuple(known[name]) for name in ("sbatch", "worker")}))

    return down(pool, tick, state_dir, carrier)


@command(examples=("gpulease fleet slurm doctor --gres gpu:8 --time 24h",))
@GRES
@TIME
@SHARED
@SBATCH
@JSON
def slurm_doctor(gres: str, time: str, shared: bool, sbatch: tuple[str, ...], json: bool) -> int:
    """Find cluster settings that would break a pool, and say how to fix them. Exits 1 if there are any."""
    from gpulease_fleet.slurm import SlurmCarrier  # noqa: PLC0415 - for this command alone

    options = _slurm_options(
        "doctor", gres=gres, time=time, shared=shared, sbatch=sbatch, worker_url="http://127.0.0.1"
    )
    found = SlurmCarrier(options).doctor()
    if json:
        output.print_json([asdict(one) for one in found])
    else:
        print_findings(found)
    return output.DONE if all(one.ok for one in found) else output.REFUSED


def up(
    pool: str,
    carrier: Carrier,
    options: dict[str, Any],
    size: tuple[int, int],
    idle_s: float,
    tick_s: float,
    *,
    once: bool,
    no_doctor: bool,
    state_dir: Path | None,
) -> int:
    """Keep a pool between these sizes until a signal arrives or the pool is taken down."""
    from gpulease_fleet.records import PoolRecord  # noqa: PLC0415 - for `up` alone

    if not no_doctor and (found := [one for one in carrier.doctor() if not one.ok]):
        print_findings(found)
        output.print_error(
            f"pool {pool} was not started",
            "this cluster would hurt it, as said above",
            "change that, or say --no-doctor",
        )
        return output.REFUSED
    with closing(_records(state_dir, pool)) as records:
        if not records.lock():
            raise InvalidRequest(f"Another process keeps pool {pool}.", remedy="Stop it, or name another --pool.")
        before = records.read_pool() if once else None  # rounds of one pool: what has failed in a row is counted on
        record = before or PoolRecord(name=pool, options={})
        least, most = size
        record = replace(record, least=least, most=most, idle_s=idle_s, down=False, problem="", options=options)
        records.put_pool(record)
        with Client() as client, logging_to_stderr("fleet", LogFormat.AUTO, LogLevel.INFO):
            return _keep(_pool(records, carrier, client), tick_s, lambda: once or _is_down(records))


def show_status(pool: str, state_dir: Path | None, json: bool) -> None:
    """Print a pool and its workers."""
    from gpulease_fleet.pool import describe  # noqa: PLC0415 - for this command alone

    with closing(_records(state_dir, pool)) as records:
        record, rows = records.read_pool(), records.pilots()
    if record is None:
        raise NotFound(f"There is no pool {pool}.", remedy="`gpulease fleet slurm up`, or `ray up`, makes one.")
    if json:
        output.print_json(describe(record, rows))
        return
    size = f"{record.most}" if record.least == record.most else f"{record.least} to {record.most}"
    state = f"paused: {record.paused}" if record.paused else "going down" if record.down else "up"
    click.echo(f"pool {pool}: {size} node{'' if size == '1' else 's'}, {state}")
    if record.problem:
        click.echo(f"this may have changed, as nothing was decided since: {record.problem}")
        click.echo("look at it with `gpulease fleet slurm doctor`, or `ray doctor`")
    heads = ("PILOT", "STATE", "JOB", "NODE", "UNTIL", "REASON")
    table = [
        (
            f"{row.ordinal}:{row.generation}",
            "ready" if row.state == "running" and row.was_ready else row.state,
            row.handle or "-",
            row.node or "-",
            row.ends_at or "-",
            row.why or "-",
        )
        for row in rows
    ]
    output.print_table(align_columns(heads, table, output.terminal_width()))


def down(pool: str, tick_s: float, state_dir: Path | None, make: Callable[[dict[str, Any]], Carrier]) -> int:
    """End a pool, and wait for that. `make`: its carrier, of the options on record."""
    from gpulease_fleet.pool import GONE  # noqa: PLC0415 - for `down` alone

    with closing(_records(state_dir, pool)) as records:
        record = records.read_pool()
        if record is None:
            raise NotFound(f"There is no pool {pool}.", remedy="`gpulease fleet slurm up`, or `ray up`, makes one.")
        records.change_pool(down=True, problem="")
        until_s = time.monotonic() + DOWN_S
        while any(row.state != GONE for row in records.pilots()):
            if records.lock():
                with Client() as client, logging_to_stderr("fleet", LogFormat.AUTO, LogLevel.INFO):
                    return _keep(_pool(records, make(record.options), client), tick_s, lambda: _is_down(records))
            if time.monotonic() > until_s:
                output.print_error(f"pool {pool} is not down yet", "its pilots take long", f"look at it: {STATUS}")
                return output.REFUSED
            time.sleep(BUSY_TICK_S)
    return output.DONE


def _keep(pool: Pool, tick_s: float, is_done: Callable[[], bool]) -> int:
    """Make rounds until all is done, or a signal comes."""
    from gpulease_fleet.carrier import EngineUnavailable  # noqa: PLC0415 - for `up` and `down` alone

    stopped, log, said = Event(), logging.getLogger("gpulease_fleet"), ""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        busy = False
        try:
            busy, error = pool.tick(time.time()), ""
        except (EngineUnavailable, GpuleaseError) as failure:
            error = failure.detail if isinstance(failure, GpuleaseError) else str(failure)
        if error != said:
            log.warning("nothing was decided: %s", error) if error else log.info("engine and daemon answer again")
            said = error
            pool.note_problem(error)
        if is_done():
            break
        stopped.wait(min(BUSY_TICK_S, tick_s) if busy else tick_s)
    return output.DONE


def _is_down(records: Records) -> bool:
    record = records.read_pool()
    return record is not None and record.down and all(row.state == "gone" for row in records.pilots())


def _pool(records: Records, carrier: Carrier, client: Client) -> Pool:
    from gpulease_fleet.daemon_client import DaemonClient  # noqa: PLC0415 - for `up` and `down` alone
    from gpulease_fleet.pool import Pool  # noqa: PLC0415 - the same

    return Pool(records, carrier, DaemonClient(client))


def _records(state_dir: Path | None, pool: str) -> Records:
    from gpulease_fleet.carrier import POOL as NAME  # noqa: PLC0415 - for commands of this module alone
    from gpulease_fleet.records import Records  # noqa: PLC0415 - the same

    if not NAME.fullmatch(pool):
        raise InvalidRequest("--pool: must be lower-case letters, digits and dashes, at most 31.")
    try:
        return Records(state_dir or default_data_dir() / "fleet", pool)
    except (OSError, sqlite3.Error) as error:
        raise InvalidRequest(f"--state-dir: cannot be used: {error}.") from error


def size_of(nodes: int | None, least: int | None, most: int | None) -> tuple[int, int]:
    """The fewest and the most nodes of a pool. Raises `InvalidRequest`."""
    if nodes is not None:
        if least is not None or most is not None:
            raise InvalidRequest("--nodes: is for a fixed number; leave it out with --min and --max.")
        return nodes, nodes
    if most is None:
        raise InvalidRequest("Say how many nodes: --nodes N, or --min N --max N.")
    if (least or 0) > most:
        raise InvalidRequest("--min: must be at most --max.")
    return least or 0, most


def _slurm_options(
    pool: str,
    *,
    gres: str,
    time: str,
    shared: bool,
    sbatch: tuple[str, ...],
    worker_url: str | None,
    worker_option: tuple[str, ...] = (),
    worker_dir: str | None = None,
    program: str | None = None,
    leave: float = 60.0,
) -> SlurmOptions:
    from gpulease_fleet.slurm_script import SlurmOptions  # noqa: PLC0415 - for `slurm` alone
    from gpulease_fleet.worker_script import default_directory  # noqa: PLC0415 - the same

    for words, name in ((sbatch, "--sbatch"), (worker_option, "--worker-option")):
        if any(not word.startswith("--") or "\n" in word for word in words):
            raise InvalidRequest(f"{name}: each must begin with --, such as {name}=--partition=gpu.")
    for word in sbatch:
        # An unambiguous beginning of an option is as good as all of it.
        if any(
            one.startswith(word.partition("=")[0]) for one in ("--array", "--clusters", "--uid", "--wait", "--wrap")
        ):
            raise InvalidRequest(
                f"--sbatch: {word} is not for pilots: each is one job of this cluster and user with its own script."
            )
    url = worker_url or os.environ.get("GPULEASE_URL") or ""
    check_url(url, plain="--plain-http" in worker_option)
    directory = Path(worker_dir).absolute() if worker_dir else default_directory(pool)
    if worker_dir or pool != "doctor":
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SlurmOptions(
        url=url,
        gres=gres,
        time=_slurm_time(time),
        exclusive=not shared,
        sbatch=sbatch,
        worker=worker_option,
        program=program or shutil.which("gpulease") or str(Path(sys.executable).parent / "gpulease"),
        directory=str(directory),
        leave_s=leave,
    )


def check_url(url: str, *, plain: bool) -> None:
    """Raises `InvalidRequest` for an address at which a worker on another host could not reach the daemon."""
    if not url.startswith(("https://", "http://")):
        raise InvalidRequest(
            f"--worker-url: {url or 'it is missing'}.",
            remedy="Name an address that the nodes reach, such as https://HOST:8750.",
        )
    if not plain and not all(address.shows_server for address in candidates(url)):
        raise InvalidRequest(
            f"--worker-url: {url} is plain HTTP to another host, which workers refuse.",
            remedy="Use https (gpulease serve --tls-cert), or --worker-option=--plain-http in a trusted network.",
        )


def _slurm_time(text: str) -> str:
    """As sbatch takes it: `24h` is 24:00:00, and what Slurm itself understands stays."""
    if ":" in text or "-" in text or text.isdecimal() or text.upper() in ("UNLIMITED", "INFINITE"):
        return text
    seconds = int(DURATION.convert(text, None, None))
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def print_findings(found: list[Finding]) -> None:
    """Print what `doctor` has found."""
    for one in found:
        click.echo(f"{'ok  ' if one.ok else 'BAD '} {one.what}")
        if one.remedy:
            click.echo(f"     {one.remedy}")
