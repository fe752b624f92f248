"""The settings of `gpulease serve`, each declared once; see `gpulease_protocol.host.settings`."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from gpulease_protocol.host.addresses import SOCKET_NAME, candidates, default_data_dir
from gpulease_protocol.host.logging import LogFormat, LogLevel
from gpulease_protocol.host.settings import (
    DATA_DIR,
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
from gpulease_server import setting_checks
from gpulease_server.database_settings import DATA, DATABASE_URL

NETWORK, ACCESS, LIMITS, QUEUE = "Network", "Access", "Limits per user", "Queue"
"""Headings in `gpulease serve --help`."""
MANY = 1_000_000
"""More of anything than one daemon could serve."""


class CommandVisibility(StrEnum):
    """Which processes' command lines a user may see."""

    OWN = "own"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Tls:
    """The files that TLS needs, PEM."""

    certificate: Path
    """The certificate and the chain that leads from it to its authority."""
    key: Path
    """Its private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a daemon. Raises ValueError where two of them contradict each other."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; the default includes ::1. Any address but loopback needs TLS or --behind-proxy.",
        # LISTEN_, because Kubernetes and Docker set NAME_PORT for a service of that name, to an address.
        variable="GPULEASE_LISTEN_HOST",
        metavar="ADDRESS",
        group=NETWORK,
    )
    port: int = setting(
        8750, "TCP port; 0 picks a free one.", variable="GPULEASE_LISTEN_PORT", minimum=0, maximum=65535, group=NETWORK
    )
    socket: Path | None = setting(
        None,
        "Unix socket.",
        variable="GPULEASE_SOCKET",
        metavar="PATH",
        default_text="gpulease.sock in the data directory",
        derive=lambda settings: (settings["data_dir"] or default_data_dir()).absolute() / SOCKET_NAME,
        group=NETWORK,
    )
    socket_mode: str = setting(
        "0666",
        "File mode of the Unix socket: who may connect to it.",
        variable="GPULEASE_SOCKET_MODE",
        metavar="MODE",
        check=setting_checks.checked_file_mode,
        group=NETWORK,
    )
    tls_cert: Path | None = setting(
        None,
        "Serve TLS on TCP with this certificate (PEM).",
        variable="GPULEASE_TLS_CERT",
        metavar="FILE",
        group=NETWORK,
    )
    tls_key: Path | None = setting(
        None, "The private key of that certificate (PEM).", variable="GPULEASE_TLS_KEY", metavar="FILE", group=NETWORK
    )
    tls_auto: bool = setting(
        False,
        "Serve TLS on TCP with a certificate of the daemon's own authority, which it makes in `tls/` of the data "
        "directory and renews in time.",
        variable="GPULEASE_TLS_AUTO",
        flag="--tls-auto/--no-tls-auto",
        group=NETWORK,
    )
    tls_names: tuple[str, ...] = setting(
        (),
        "With --tls-auto: another name or address of this host for the certificate, besides those that it finds. "
        "Repeatable.",
        variable="GPULEASE_TLS_NAMES",
        flag="--tls-name",
        metavar="NAME",
        group=NETWORK,
    )
    behind_proxy: bool = setting(
        False,
        "A proxy terminates TLS: callers over TCP are identified by token alone.",
        variable="GPULEASE_BEHIND_PROXY",
        flag="--behind-proxy/--no-behind-proxy",
        group=NETWORK,
    )
    admins: tuple[str, ...] = setting(
        (),
        "Administrator, in addition to root and the daemon's own user; @GROUP means every member of a group. "
        "Repeatable.",
        variable="GPULEASE_ADMINS",
        flag="--admin",
        metavar="USER|@GROUP",
        check=setting_checks.checked_admins,
        group=ACCESS,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Let web pages of ORIGIN (scheme://host[:port]) call the API with a token. Repeatable.",
        variable="GPULEASE_CORS_ORIGINS",
        flag="--cors-origin",
        metavar="ORIGIN",
        check=setting_checks.normalized_origins,
        group=ACCESS,
    )
    show_commands: CommandVisibility = setting(
        CommandVisibility.ALL,
        "Which command lines users see: those of all processes, or of their own only.",
        variable="GPULEASE_SHOW_COMMANDS",
        group=ACCESS,
    )
    max_leases_per_user: int = setting(
        0,
        "Active leases of one user; 0 means no limit.",
        variable="GPULEASE_MAX_LEASES_PER_USER",
        minimum=0,
        maximum=MANY,
        group=LIMITS,
    )
    max_gpus_per_user: int = setting(
        0,
        "Leased GPUs of one user; 0 means no limit.",
        variable="GPULEASE_MAX_GPUS_PER_USER",
        minimum=0,
        maximum=MANY,
        group=LIMITS,
    )
    max_interactive_gpus: int = setting(
        2,
        "Leased GPUs of one user by requests of priority interactive; 0 means no limit.",
        variable="GPULEASE_MAX_INTERACTIVE_GPUS",
        minimum=0,
        maximum=MANY,
        group=LIMITS,
    )
    max_interactive_s: float = setting(
        4 * 3600.0,
        "How long a request of priority interactive may hold its GPUs; 0 means no limit. Seconds.",
        variable="GPULEASE_MAX_INTERACTIVE_S",
        minimum=0,
        maximum=366 * 24 * 3600,
        group=LIMITS,
    )
    max_queue_per_user: int = setting(
        8000,
        "Queued requests of one user; 0 means no limit.",
        variable="GPULEASE_MAX_QUEUE_PER_USER",
        minimum=0,
        maximum=MANY,
        group=LIMITS,
    )
    max_queue_bytes_per_user: int = setting(
        128 * 2**20,
        "Memory that queued requests of one user take, most of it the environments of jobs; 0 means no limit. Bytes.",
        variable="GPULEASE_MAX_QUEUE_BYTES_PER_USER",
        minimum=0,
        maximum=2**40,
        group=LIMITS,
    )
    max_rps_per_user: float = setting(
        0.0,
        "HTTP requests per second of one user; 0 means no limit.",
        variable="GPULEASE_MAX_RPS_PER_USER",
        minimum=0,
        maximum=MANY,
        group=LIMITS,
    )
    idle_command: str = setting(
        "",
        "Command to run when a lease has been idle for `--idle-after-s`, once for each idle time. Words as in a shell, "
        "but no shell reads them; variables such as GPULEASE_IDLE_USER tell of the lease.",
        variable="GPULEASE_IDLE_COMMAND",
        metavar="COMMAND",
        check=setting_checks.checked_command,
        group=QUEUE,
    )
    idle_after_s: float = setting(
        1800.0,
        "How long a lease is idle before `--idle-command` runs. Seconds.",
        variable="GPULEASE_IDLE_AFTER_S",
        minimum=1,
        maximum=366 * 24 * 3600,
        group=QUEUE,
    )
    max_keep_s: float = setting(
        24 * 3600.0,
        "How long `gpulease keep` may keep idle GPUs, from the moment when it is said; 0 means not at all. Seconds.",
        variable="GPULEASE_MAX_KEEP_S",
        minimum=0,
        maximum=366 * 24 * 3600,
        group=QUEUE,
    )
    reclaim_idle_interactive_after_s: float = setting(
        0.0,
        "After how long without work the GPUs of a lease of priority interactive are taken back if others wait for "
        "them; at least 60, and 0 means never. Seconds.",
        variable="GPULEASE_RECLAIM_IDLE_INTERACTIVE_AFTER_S",
        minimum=0,
        maximum=366 * 24 * 3600,
        check=setting_checks.checked_reclaim,
        group=QUEUE,
    )
    database_url: str | None = shared(None, DATABASE_URL)
    data_dir: Path = shared(default_data_dir, DATA_DIR)
    worker: bool = setting(
        True,
        "Run a worker for this host.",
        variable="GPULEASE_WORKER",
        flag="--worker/--no-worker",
        group=HARDWARE,
    )
    simulate: str | None = shared(None, SIMULATE)
    node: str = shared(host_node_name, NODE)
    desktop_names: tuple[str, ...] = setting(
        (),
        "Treat PROGRAM as part of the desktop: its processes do not make a GPU `foreign`. Repeatable.",
        variable="GPULEASE_DESKTOP_NAMES",
        flag="--desktop-name",
        metavar="PROGRAM",
        group=HARDWARE,
    )
    monitor_names: tuple[str, ...] = setting(
        (),
        "Treat PROGRAM as a monitor: it may keep device files of GPUs open. Repeatable.",
        variable="GPULEASE_MONITOR_NAMES",
        flag="--monitor-name",
        metavar="PROGRAM",
        group=HARDWARE,
    )
    retained_memory_s: float = setting(
        30.0,
        "How long a GPU may stay `draining` because of memory that only the driver still holds, or because a process "
        "outside any lease keeps its device file open. Seconds.",
        variable="GPULEASE_RETAINED_MEMORY_S",
        minimum=0,
        maximum=3600,
        group=HARDWARE,
    )
    kill_leftovers: bool | None = shared(None, replace(KILL_LEFTOVERS, for_worker=True))
    manage_compute_mode: bool | None = shared(None, replace(MANAGE_COMPUTE_MODE, for_worker=True))
    standby: bool = setting(
        False,
        "Stand by while another daemon writes to the database, and take over when that one is gone; PostgreSQL only.",
        variable="GPULEASE_STANDBY",
        flag="--standby/--no-standby",
        group=DATA,
    )
    peers: tuple[str, ...] = setting(
        (),
        "Another daemon on the same database, to which this host's worker reports while this daemon does not serve. "
        "Repeatable.",
        variable="GPULEASE_PEERS",
        flag="--peer",
        metavar="URL",
        group=DATA,
    )
    max_bypass: int = setting(
        10,
        "How many times newer requests may pass a waiting one before GPUs are reserved for it; 0 means strict order.",
        variable="GPULEASE_MAX_BYPASS",
        minimum=0,
        maximum=MANY,
        group=QUEUE,
    )
    max_bypass_s: float = setting(
        300.0,
        "How long newer requests may pass a waiting one, from the first that passed it; 0 means strict order. Seconds.",
        variable="GPULEASE_MAX_BYPASS_S",
        minimum=0,
        maximum=366 * 24 * 3600,
        group=QUEUE,
    )
    easy_backfill: bool = setting(
        False,
        "Start requests with a time ahead of older ones that they do not delay (EASY backfill); on trial.",
        variable="GPULEASE_EASY_BACKFILL",
        flag="--easy-backfill/--no-easy-backfill",
        group=QUEUE,
    )
    fair_share: bool = setting(
        False,
        "Order requests of the same priority by the recent usage of their users, least first, instead of by arrival.",
        variable="GPULEASE_FAIR_SHARE",
        flag="--fair-share/--no-fair-share",
        group=QUEUE,
    )
    usage_half_life_days: float = setting(
        7.0,
        "Half-life of usage: GPU-hours that were used this long ago count half. Days.",
        variable="GPULEASE_USAGE_HALF_LIFE_DAYS",
        minimum=0.01,
        maximum=36_500,
        group=QUEUE,
    )
    gpu_weights: tuple[str, ...] = setting(
        (),
        "As how many GPUs a GPU with MODEL in its name counts, as in H100=2; all others count as 1. Repeatable.",
        variable="GPULEASE_GPU_WEIGHTS",
        flag="--gpu-weight",
        metavar="MODEL=N",
        check=setting_checks.checked_weights,
        group=QUEUE,
    )
    group_shares: tuple[str, ...] = setting(
        (),
        "With fair share: order the members of the group of limits GROUP by what all of them have used, before their "
        "own usage; it counts as N users, as in vision=5. Repeatable.",
        variable="GPULEASE_GROUP_SHARES",
        flag="--group-share",
        metavar="GROUP=N",
        check=setting_checks.checked_shares,
        group=QUEUE,
    )
    max_overtakes: int = setting(
        50,
        "How many requests may be granted by their priority or their user's usage before the one that has waited "
        "longest goes first.",
        variable="GPULEASE_MAX_OVERTAKES",
        minimum=1,
        maximum=MANY,
        group=QUEUE,
    )
    preemption: bool = setting(
        False,
        "End leases and jobs that are preemptible, after a notice, if the first request that waits can then start.",
        variable="GPULEASE_PREEMPTION",
        flag="--preemption/--no-preemption",
        group=QUEUE,
    )
    preempt_after_s: float = setting(
        600.0,
        "How long a lease must have held its GPUs before it can be preempted. Seconds.",
        variable="GPULEASE_PREEMPT_AFTER_S",
        flag="--preempt-after",
        minimum=0,
        maximum=366 * 24 * 3600,
        group=QUEUE,
    )
    preempt_notice_s: float = setting(
        120.0,
        "How long before its end the holder of a preempted lease is told; a job gets SIGTERM at that moment, and "
        "SIGKILL at the end. Seconds.",
        variable="GPULEASE_PREEMPT_NOTICE_S",
        flag="--preempt-notice",
        minimum=1,
        maximum=3600,
        group=QUEUE,
    )
    node_lost_after_s: float = setting(
        3600.0,
        "How long a node may be silent before its jobs are `lost` and its leases end as `node_lost`; 0 means never. "
        "Seconds.",
        variable="GPULEASE_NODE_LOST_AFTER_S",
        flag="--node-lost-after",
        minimum=0,
        maximum=366 * 24 * 3600,
        group=HARDWARE,
    )
    max_observation_age_s: float = setting(
        0.5,
        "Maximum age of the reading on which a grant rests. Seconds.",
        variable="GPULEASE_MAX_OBSERVATION_AGE_S",
        minimum=0.05,
        maximum=60,
        group=QUEUE,
    )
    keep_days: float = setting(
        90.0,
        "How long to keep ended leases and jobs, events, and nodes that are gone. Days.",
        variable="GPULEASE_KEEP_DAYS",
        minimum=1,
        maximum=36_500,
        group=DATA,
    )
    keep_ended: int = setting(
        200_000,
        "How many ended leases, and how many ended jobs, to keep.",
        variable="GPULEASE_KEEP_ENDED",
        minimum=1000,
        maximum=10**9,
        group=DATA,
    )
    keep_events: int = setting(
        1_000_000,
        "How many events to keep.",
        variable="GPULEASE_KEEP_EVENTS",
        minimum=1000,
        maximum=10**9,
        group=DATA,
    )
    log_format: LogFormat = shared(LogFormat.AUTO, LOG_FORMAT)
    log_level: LogLevel = shared(LogLevel.INFO, LOG_LEVEL)
    worker_options: tuple[str, ...] = ()
    """Options for this host's worker in addition to those that the daemon chooses for it."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key are given together or not at all")
        if self.tls_auto and self.tls_cert is not None:
            raise ValueError("--tls-auto makes a certificate, and --tls-cert names one: give one of them")

    @property
    def tls(self) -> Tls | None:
        """The files for TLS on TCP; None without TLS."""
        if self.tls_auto:
            own = self.tls_directory / "server.pem"
            return Tls(own, own)
        return None if self.tls_cert is None or self.tls_key is None else Tls(self.tls_cert, self.tls_key)

    @property
    def tls_directory(self) -> Path:
        """Where the daemon's own authority is, with `tls_auto`."""
        return self.data_dir.absolute() / "tls"

    @property
    def peer_urls(self) -> tuple[str, ...]:
        """Addresses of the other daemons on this database. Raises `InvalidRequest` for what is not an address."""
        return tuple(address.url for address in candidates(self.peers)) if self.peers else ()
