"""The settings of `gpulease worker`, each declared once; see `gpulease_protocol.host.settings`."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.addresses import DEFAULT_URL, candidates, default_data_dir
from gpulease_protocol.host.logging import LogFormat, LogLevel
from gpulease_protocol.host.settings import (
    HARDWARE,
    KILL_LEFTOVERS,
    LOG_FORMAT,
    LOG_LEVEL,
    MANAGE_COMPUTE_MODE,
    NODE,
    SIMULATE,
    host_node_name,
    setting,
    shared,
)
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.jobs import resource_limits
from gpulease_worker.jobs.job_settings import LOG_BYTES, MAX_PROCESSES, JobSettings

DAEMON, READINGS, JOBS, ALLOCATION = "Daemon", "Readings", "Jobs", "Allocation"
"""Headings in `gpulease worker --help`."""
LEAST_SECONDS = 0.05
SLURM = "slurm"
ALLOCATION_LEAVE_S = 60.0
"""How long leaving may take in an allocation, where `leave_s` says nothing."""


def default_worker_dir() -> Path:
    """Where the worker of the current user keeps its lock and its jobs."""
    return default_data_dir() / "worker"


def valid_address(text: str) -> str:
    """An IP address in its usual form. Raises ValueError for what other hosts cannot connect to."""
    import ipaddress  # noqa: PLC0415 - where one is named

    found = ipaddress.ip_address(text.strip())
    if found.is_unspecified or found.is_multicast:
        raise ValueError(f"{text!r} is not the address of one host")
    return str(found)


def _interval(default_s: float, help: str, maximum_s: float, variable: str) -> Any:
    """A setting in seconds, over 0."""
    return setting(
        default_s, f"{help} Seconds.", variable=variable, minimum=LEAST_SECONDS, maximum=maximum_s, group=READINGS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker."""

    url: str = setting(
        DEFAULT_URL,
        "Where the daemon listens; several addresses of one service are separated by commas.",
        variable="GPULEASE_URL",
        metavar="URL",
        group=DAEMON,
    )
    plain_http: bool = setting(
        False,
        "Take orders over plain HTTP from a daemon on another host. Anyone who controls the network in between can "
        "then run programs here, for a worker of root as any user.",
        variable="GPULEASE_PLAIN_HTTP",
        flag="--plain-http/--no-plain-http",
        group=DAEMON,
    )
    token_file: Path | None = setting(
        None,
        "File with the bearer token for the daemon, which no other user may read. Else the token is in GPULEASE_TOKEN.",
        variable="GPULEASE_TOKEN_FILE",
        metavar="FILE",
        group=DAEMON,
    )
    node: str = shared(host_node_name, NODE)
    address: str | None = setting(
        None,
        "IP address under which other nodes reach this one.",
        variable="GPULEASE_ADDRESS",
        metavar="ADDRESS",
        default_text="the one from which the daemon is reached",
        check=valid_address,
        group=DAEMON,
    )
    data_dir: Path = setting(
        default_worker_dir,
        "Directory for records and logs of jobs.",
        variable="GPULEASE_WORKER_DIR",
        metavar="DIR",
        default_text="/var/lib/gpulease/worker for root, else ~/.local/share/gpulease/worker",
        group=JOBS,
    )
    simulate: str | None = shared(None, SIMULATE)
    poll_s: float = _interval(1.0, "Time between two readings.", 2.0, "GPULEASE_POLL_S")
    processes_s: float = _interval(5.0, "Time between two reads of the process lists.", 60.0, "GPULEASE_PROCESSES_S")
    health_s: float = _interval(
        30.0, "Time between two reads of ECC counts, throttle reasons and links.", 3600.0, "GPULEASE_HEALTH_S"
    )
    probe_deadline_s: float = _interval(
        2.0, "How long one reading may take before the GPUs are `unknown`.", 60.0, "GPULEASE_PROBE_DEADLINE_S"
    )
    call_deadline_s: float = _interval(
        60.0, "How long one driver call may take before the probe is replaced.", 600.0, "GPULEASE_CALL_DEADLINE_S"
    )
    start_deadline_s: float = _interval(
        120.0, "How long a new probe may take to open the driver.", 600.0, "GPULEASE_START_DEADLINE_S"
    )
    idle_memory_bytes: int = setting(
        16 * 2**20,
        "How much memory may be in use on an idle GPU, where other users' processes cannot be seen (in a container "
        "without --pid=host, under WSL2). Bytes.",
        variable="GPULEASE_IDLE_MEMORY_BYTES",
        minimum=0,
        maximum=2**50,
        group=HARDWARE,
    )
    gpus: str | None = setting(
        None,
        "Show only these GPUs of the host: UUIDs, or indices as `gpulease gpu list` has them, such as 0-3,6. Default: "
        "all, or those of the allocation.",
        variable="GPULEASE_GPUS",
        metavar="GPUS",
        group=HARDWARE,
    )
    kill_leftovers: bool = shared(False, KILL_LEFTOVERS)
    manage_compute_mode: bool = shared(False, MANAGE_COMPUTE_MODE)
    log_bytes: int = setting(
        LOG_BYTES,
        "How much of each log file of a job to keep; the oldest part goes first. Bytes.",
        variable="GPULEASE_LOG_BYTES",
        minimum=2**16,
        maximum=2**50,
        group=JOBS,
    )
    keep_jobs: int = setting(
        1000,
        "How many ended jobs keep their directory, with its logs; the oldest go first.",
        variable="GPULEASE_KEEP_JOBS",
        minimum=0,
        maximum=1_000_000,
        group=JOBS,
    )
    job_pids: int = setting(
        MAX_PROCESSES,
        "How many processes and threads a job may have; 0 means no limit. Without a cgroup with the pids controller it "
        "limits all processes of the user, in jobs of users other than the worker's own.",
        variable="GPULEASE_JOB_PIDS",
        minimum=0,
        maximum=2**22,
        group=JOBS,
    )
    job_memory_bytes: int = setting(
        0,
        "How much memory a job may use, if it has a cgroup with the memory controller; 0 means no limit. Bytes.",
        variable="GPULEASE_JOB_MEMORY_BYTES",
        minimum=0,
        maximum=2**60,
        group=JOBS,
    )
    pam_service: str | None = setting(
        None,
        "Open a session of this PAM service for each job, as for a login: jobs then keep to the user's limits in "
        "limits.conf. For a worker that runs as root.",
        variable="GPULEASE_PAM_SERVICE",
        metavar="NAME",
        group=JOBS,
    )
    no_new_privs: bool = setting(
        False,
        "Let no program of a job gain privileges: setuid programs such as sudo do not work in jobs.",
        variable="GPULEASE_NO_NEW_PRIVS",
        flag="--no-new-privs/--new-privs",
        group=JOBS,
    )
    leave_s: float = setting(
        0.0,
        "On SIGTERM, leave within this time: no more grants, jobs end and restart elsewhere, then the daemon forgets "
        "the node. 0: jobs continue without the worker. Seconds.",
        variable="GPULEASE_LEAVE_S",
        minimum=0.0,
        maximum=3600.0,
        group=ALLOCATION,
    )
    allocation: str | None = setting(
        None,
        "What the worker runs in: `slurm`, for a job of Slurm; `pid:N,...` for an allocation that lasts as long as "
        "these processes. The worker then shows only the GPUs of the allocation, tells the daemon when that ends, and "
        "leaves before it ends, or when it is gone.",
        variable="GPULEASE_ALLOCATION",
        metavar="KIND",
        group=ALLOCATION,
    )
    allocation_poll_s: float = setting(
        60.0,
        "Time between two looks at the allocation. Seconds.",
        variable="GPULEASE_ALLOCATION_POLL_S",
        minimum=0.2,
        maximum=3600.0,
        group=ALLOCATION,
    )
    log_format: LogFormat = shared(LogFormat.AUTO, LOG_FORMAT)
    log_level: LogLevel = shared(LogLevel.INFO, LOG_LEVEL)
    token: str | None = field(default=None, repr=False)
    """Bearer token for the daemon, needed if the connection does not identify this worker."""
    with_parent: bool = False
    """End when the process that started this one ends."""
    leftover_grace_s: float = 5.0
    """Time between SIGTERM and SIGKILL for leftover processes."""

    @property
    def leaves_within_s(self) -> float:
        """How long leaving may take; 0 for a worker that does not leave. Seconds."""
        return self.leave_s or (ALLOCATION_LEAVE_S if self.allocation else 0.0)

    @property
    def allocation_pids(self) -> tuple[int, ...]:
        """The processes that an allocation lasts as long as; none for another kind. Raises `InvalidRequest` for an
        unknown kind."""
        if self.allocation in (None, SLURM):
            return ()
        found = re.fullmatch(r"pid:(\d{1,9}(?:,\d{1,9})*)", self.allocation or "")
        if found is None:
            raise InvalidRequest(
                f"allocation: {self.allocation!r} is not known.", remedy="It is `slurm`, or `pid:` and process ids."
            )
        return tuple(map(int, found[1].split(",")))

    @property
    def of_jobs(self) -> JobSettings:
        """Those of each job."""
        return JobSettings(
            log_bytes=self.log_bytes,
            max_processes=self.job_pids,
            memory_bytes=self.job_memory_bytes,
            no_new_privs=self.no_new_privs,
            pam_service=self.pam_service,
            open_files=resource_limits.OPEN_FILES,
            node=self.node,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the daemon is, `http://HOST:PORT` or `unix:///path/to/gpulease.sock`; several where one takes over from
        another. Raises `InvalidRequest` for what is not an address, and for plain HTTP to another host without
        `plain_http`: who answers there gives orders to this worker."""
        addresses = candidates(self.url)
        for address in addresses:
            if not (self.plain_http or address.shows_server):
                raise InvalidRequest(
                    f"url: {address.shown} is plain HTTP to another host, where nothing shows that the daemon answers.",
                    remedy="Use https (gpulease serve --tls-cert), or ssh -L and http://127.0.0.1:PORT; on the daemon's"
                    " own host its socket. --plain-http is for a network that you trust as you trust root.",
                )
        return tuple(address.url for address in addresses)
