"""`gpulease serve` and `worker`, and what `doctor` asks: commands that need more than the client.

Only this module and `database` beside it import the server and the worker, and only when such a command is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulease.addresses import DEFAULT_URL, candidates, default_data_dir
from gpulease.cli import output, settings
from gpulease.cli.access_options import (
    MANY,
    Admins,
    BehindProxy,
    Commands,
    CorsOrigins,
    Host,
    MaxGpusPerUser,
    MaxLeasesPerUser,
    MaxQueuePerUser,
    MaxRpsPerUser,
    ShowCommands,
    Socket,
    SocketMode,
    TlsCert,
    TlsKey,
    octal,
)
from gpulease.cli.options import fraction
from gpulease.config_file import load
from gpulease.log_lines import LogFormat, LogLevel

if TYPE_CHECKING:
    from gpulease_server.main import ServeSettings
    from gpulease_worker.doctor import Finding

DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GPULEASE_DATA_DIR",
        help="Where everything is kept.",
        file_okay=False,
        show_default="/var/lib/gpulease for root, else ~/.local/share/gpulease",
    ),
]
WorkerDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GPULEASE_WORKER_DIR",
        help="Where records and logs of jobs are kept.",
        file_okay=False,
        show_default="/var/lib/gpulease/worker for root, else ~/.local/share/gpulease/worker",
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="GPULEASE_DATABASE_URL",
        help="Database: postgresql://user@host/name, or sqlite:////path. Others see an option's password; the "
        "variable's, or that of ~/.pgpass, they do not.",
        show_default="SQLite in the data directory",
        show_envvar=True,
    ),
]
Simulate = Annotated[
    str | None,
    typer.Option(
        metavar="N|FILE",
        envvar="GPULEASE_SIMULATE",
        help="Instead of real GPUs: so many plausible ones, or those of a file.",
    ),
]
NodeName = Annotated[
    str | None, typer.Option(envvar="GPULEASE_NODE", help="Name of this host's node.", show_default="its host name")
]
IdleMemoryBytes = Annotated[
    int,
    typer.Option(
        envvar="GPULEASE_IDLE_MEMORY_BYTES",
        min=0,
        max=2**50,
        help="How much memory in use still is that of an idle GPU, where the processes of others cannot be seen (in a "
        "container without --pid=host, under WSL2). Bytes.",
    ),
]
KILL_LEFTOVERS: Any = typer.Option(
    "--kill-leftovers/--no-kill-leftovers",
    envvar="GPULEASE_KILL_LEFTOVERS",
    help="End what users leave on a GPU after their lease.",
)
MANAGE_COMPUTE_MODE: Any = typer.Option(
    "--manage-compute-mode/--no-manage-compute-mode",
    envvar="GPULEASE_MANAGE_COMPUTE_MODE",
    help="Set EXCLUSIVE_PROCESS on a GPU for the time of a lease; needs root.",
)
Format = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="GPULEASE_LOG_FORMAT",
        help="Lines of the log for people, or as JSON; auto is for people on a terminal.",
    ),
]
Level = Annotated[LogLevel, typer.Option("--log-level", envvar="GPULEASE_LOG_LEVEL", help="The least that is logged.")]
Port = Annotated[
    int, typer.Option(envvar="GPULEASE_LISTEN_PORT", min=0, max=65535, help="TCP port; 0 takes a free one.")
]
WithWorker = Annotated[
    bool, typer.Option("--worker/--no-worker", envvar="GPULEASE_WORKER", help="Run a worker for this host.")
]
DesktopNames = Annotated[
    list[str] | None,
    typer.Option(
        "--desktop-name",
        envvar="GPULEASE_DESKTOP_NAMES",
        help="A desktop's program, let pass on free GPUs; repeatable.",
    ),
]
MonitorNames = Annotated[
    list[str] | None,
    typer.Option(
        "--monitor-name", envvar="GPULEASE_MONITOR_NAMES", help="A program that only watches GPUs; repeatable."
    ),
]
RetainedMemorySeconds = Annotated[
    float,
    typer.Option(
        envvar="GPULEASE_RETAINED_MEMORY_S",
        min=0,
        max=3600,
        callback=fraction,
        help="How long a GPU whose lease has ended is kept for memory that the driver alone still holds, or for a "
        "device file that a process of no lease has open. Seconds.",
    ),
]
Standby = Annotated[
    bool,
    typer.Option(
        "--standby/--no-standby",
        envvar="GPULEASE_STANDBY",
        help="Stand by while another daemon writes to the database, and take over when it is gone; PostgreSQL only.",
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="URL",
        envvar="GPULEASE_PEERS",
        help="Another daemon on the same database, for this host's worker to report to while this one does not serve; "
        "repeatable.",
    ),
]
MaxBypass = Annotated[
    int,
    typer.Option(
        envvar="GPULEASE_MAX_BYPASS",
        min=0,
        max=MANY,
        help="How often younger requests may pass one that waits, before GPUs are held for it; 0 is strict order.",
    ),
]
MaxBypassSeconds = Annotated[
    float,
    typer.Option(
        envvar="GPULEASE_MAX_BYPASS_S",
        min=0,
        max=366 * 24 * 3600,
        callback=fraction,
        help="For how long from the first time on they may; 0 is strict order. Seconds.",
    ),
]
MaxObservationAge = Annotated[
    float,
    typer.Option(
        "--max-observation-age-s",
        envvar="GPULEASE_MAX_OBSERVATION_AGE_S",
        min=0.05,
        max=60,
        callback=fraction,
        help="How old a reading may be that a grant rests on, where no newer one was asked for. Seconds.",
    ),
]
KeepDays = Annotated[
    float,
    typer.Option(
        envvar="GPULEASE_KEEP_DAYS",
        min=1,
        max=36_500,
        help="How long ended leases and jobs, events, and nodes that are gone are kept. Days.",
    ),
]
KeepEnded = Annotated[
    int,
    typer.Option(
        envvar="GPULEASE_KEEP_ENDED", min=1000, max=10**9, help="How many ended leases and jobs are kept, at most."
    ),
]
KeepEvents = Annotated[
    int, typer.Option(envvar="GPULEASE_KEEP_EVENTS", min=1000, max=10**9, help="How many events are kept, at most.")
]


def _seconds(name: str, text: str, most: float) -> Any:
    """An option of so many seconds, over 0; also read from GPULEASE_<NAME>_S, which reaches the worker of `serve`."""
    variable = f"GPULEASE_{name.replace('-', '_').upper()}_S"
    return typer.Option(f"--{name}-s", help=f"{text} Seconds.", envvar=variable, min=0.05, max=most)


PROBE_DEADLINE: Any = _seconds("probe-deadline", "How long one reading may take before the GPUs are unknown.", 60.0)
CALL_DEADLINE: Any = _seconds("call-deadline", "How long one driver call may take before the probe is replaced.", 600.0)
START_DEADLINE: Any = _seconds("start-deadline", "How long the driver may take to be opened.", 600.0)


def serve(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8750,
    socket: Socket = None,
    socket_mode: SocketMode = "0666",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    behind_proxy: BehindProxy = False,
    admins: Admins = None,
    cors_origins: CorsOrigins = None,
    show_commands: ShowCommands = Commands.ALL,
    max_leases_per_user: MaxLeasesPerUser = 0,
    max_gpus_per_user: MaxGpusPerUser = 0,
    max_queue_per_user: MaxQueuePerUser = 8000,
    max_rps_per_user: MaxRpsPerUser = 0.0,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    worker: WithWorker = True,
    simulate: Simulate = None,
    node: NodeName = None,
    desktop_names: DesktopNames = None,
    monitor_names: MonitorNames = None,
    retained_memory_s: RetainedMemorySeconds = 30.0,
    kill_leftovers: Annotated[bool | None, KILL_LEFTOVERS] = None,
    manage_compute_mode: Annotated[bool | None, MANAGE_COMPUTE_MODE] = None,
    standby: Standby = False,
    peers: Peers = None,
    max_bypass: MaxBypass = 10,
    max_bypass_s: MaxBypassSeconds = 300.0,
    max_observation_age_s: MaxObservationAge = 0.5,
    keep_days: KeepDays = 90.0,
    keep_ended: KeepEnded = 200_000,
    keep_events: KeepEvents = 1_000_000,
    log_format: Format = LogFormat.AUTO,
    log_level: Level = LogLevel.INFO,
) -> int:
    """Run the daemon, and a worker for this host."""
    given = dict(locals())
    with extra("server"):
        from gpulease_server.main import serve as run_daemon  # noqa: PLC0415 - an extra
    told = settings.options_of_worker(context.find_root().command, load())
    told += _chosen("kill-leftovers", kill_leftovers) + _chosen("manage-compute-mode", manage_compute_mode)
    return run_daemon(_settings(given, told))


def _settings(given: Mapping[str, Any], worker_options: tuple[str, ...]) -> ServeSettings:
    """What the options of `serve`, by name, say. Raises BadParameter where two of them do not go together."""
    from gpulease_server.api.callers import Access  # noqa: PLC0415 - an extra
    from gpulease_server.core.quota import Limits  # noqa: PLC0415
    from gpulease_server.main import ServeSettings, Tls  # noqa: PLC0415
    from gpulease_server.store.retention import Keep  # noqa: PLC0415

    same = (
        *("host", "port", "socket", "database_url", "data_dir", "worker", "simulate", "node", "standby"),
        *("max_bypass", "max_bypass_s", "max_observation_age_s", "retained_memory_s", "log_format", "log_level"),
    )
    certificate, key = given["tls_cert"], given["tls_key"]
    if (certificate is None) is not (key is None):
        raise typer.BadParameter("--tls-cert and --tls-key are given together or not at all")
    return ServeSettings(
        **{name: given[name] for name in same},
        worker_options=worker_options,
        socket_mode=octal(given["socket_mode"]),
        tls=None if certificate is None else Tls(certificate, key),
        access=Access(
            admins=frozenset(given["admins"] or ()),
            behind_proxy=given["behind_proxy"],
            origins=frozenset(given["cors_origins"] or ()),
            show_commands=given["show_commands"] is Commands.ALL,
            max_rps_per_user=given["max_rps_per_user"],
        ),
        limits=Limits(
            leases=given["max_leases_per_user"], gpus=given["max_gpus_per_user"], queued=given["max_queue_per_user"]
        ),
        desktop_names=tuple(given["desktop_names"] or ()),
        monitor_names=tuple(given["monitor_names"] or ()),
        peers=tuple(address.url for address in candidates(given["peers"])) if given["peers"] else (),
        keep=Keep(age_s=given["keep_days"] * 24 * 3600.0, ended=given["keep_ended"], events=given["keep_events"]),
    )


def _chosen(option: str, wanted: bool | None) -> tuple[str, ...]:
    """The words for a switch that was turned one way or the other."""
    return () if wanted is None else (f"--{option}" if wanted else f"--no-{option}",)


def worker(
    url: Annotated[
        str,
        typer.Option(envvar="GPULEASE_URL", help="Where the daemon listens; several of one service with commas."),
    ] = DEFAULT_URL,
    node: NodeName = None,
    data_dir: WorkerDir = None,
    simulate: Simulate = None,
    poll_s: Annotated[float, _seconds("poll", "Time between two readings.", 2.0)] = 1.0,
    processes_s: Annotated[float, _seconds("processes", "Time between two reads of process lists.", 60.0)] = 5.0,
    health_s: Annotated[float, _seconds("health", "Time between two reads of ECC, throttling, links.", 3600.0)] = 30.0,
    probe_deadline_s: Annotated[float, PROBE_DEADLINE] = 2.0,
    call_deadline_s: Annotated[float, CALL_DEADLINE] = 60.0,
    start_deadline_s: Annotated[float, START_DEADLINE] = 120.0,
    idle_memory_bytes: IdleMemoryBytes = 16 * 2**20,
    kill_leftovers: Annotated[bool, KILL_LEFTOVERS] = False,
    manage_compute_mode: Annotated[bool, MANAGE_COMPUTE_MODE] = False,
    log_bytes: Annotated[
        int,
        typer.Option(
            envvar="GPULEASE_LOG_BYTES",
            min=2**16,
            max=2**50,
            help="How much of each log file of a job stays on disk. Bytes.",
        ),
    ] = 256 * 2**20,
    keep_jobs: Annotated[
        int,
        typer.Option(
            envvar="GPULEASE_KEEP_JOBS",
            min=0,
            max=1_000_000,
            help="How many jobs that are over keep their directory, with their logs; the oldest go first.",
        ),
    ] = 1000,
    log_format: Format = LogFormat.AUTO,
    log_level: Level = LogLevel.INFO,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when the parent ends.")] = False,
) -> int:
    """Run the worker of this host: it watches the GPUs and launches jobs."""
    with extra("worker"):
        from gpulease_worker.main import run  # noqa: PLC0415 - an extra
        from gpulease_worker.settings import WorkerSettings  # noqa: PLC0415
        from gpulease_worker.source import Pace  # noqa: PLC0415
    return run(
        WorkerSettings(
            urls=tuple(address.url for address in candidates(url)),
            token=os.environ.get("GPULEASE_TOKEN") or None,
            node=node or node_name(),
            data_dir=data_dir or default_data_dir() / "worker",
            simulate=simulate,
            with_parent=with_parent,
            poll_s=poll_s,
            probe_deadline_s=probe_deadline_s,
            start_deadline_s=start_deadline_s,
            pace=Pace(processes_s=processes_s, health_s=health_s, call_deadline_s=call_deadline_s),
            idle_memory_bytes=idle_memory_bytes,
            kill_leftovers=kill_leftovers,
            manage_compute_mode=manage_compute_mode,
            log_bytes=log_bytes,
            keep_jobs=keep_jobs,
            log_format=log_format,
            log_level=log_level,
        )
    )


def examine_host(data_dir: Path) -> tuple[Finding, ...]:
    """What the checks of `gpulease doctor` find on this host."""
    with extra("worker"):
        from gpulease_worker import doctor, symptoms  # noqa: PLC0415 - an extra
    return doctor.examine(symptoms.gather(data_dir))


def node_name() -> str:
    """This host's name, in characters that an address can carry."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", gethostname())[:255] or "localhost"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Say in one line what to install when an import in the block fails for want of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        output.complain(
            f"this command needs the {name} extra",
            f"the package {error.name} is missing",
            f"pip install 'gpulease[{name}]'",
        )
        raise typer.Exit(output.REFUSED) from error
