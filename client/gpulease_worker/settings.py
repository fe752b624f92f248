"""What a worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpulease.log_lines import LogFormat, LogLevel
from gpulease_worker.jobs import KEEP_JOBS
from gpulease_worker.launch import LOG_BYTES
from gpulease_worker.source import IDLE_BYTES, Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is told at its start."""

    urls: tuple[str, ...]
    """Where the daemon is, `http://HOST:PORT` or `unix:///path/to/gpulease.sock`; several where one takes over from
    another."""
    token: str | None = field(default=None, repr=False)
    """Bearer token to send to them, where they do not know this worker by its connection."""
    node: str
    """Name of this node, unique at the daemon."""
    data_dir: Path
    """Where the worker keeps its lock and its jobs; made if missing. One worker per directory."""
    simulate: str | None = None
    """None reads NVML; `N` or a file's path simulates."""
    with_parent: bool = False
    """End when the process that started this one ends."""
    poll_s: float = 1.0
    """How long the daemon may hold an answer while nothing changes: the time between two readings."""
    probe_deadline_s: float = 2.0
    """How long one reading may take before the GPUs are unknown. With `poll_s` it is the time after which a hung driver
    is known to hang. The probe is replaced when a call has not come back for `pace.call_deadline_s`."""
    start_deadline_s: float = 120.0
    """How long a new probe may take to open the driver."""
    pace: Pace = field(default_factory=Pace)
    """How often what is read, and how long one call may take."""
    idle_memory_bytes: int = IDLE_BYTES
    """How much memory in use is still that of an idle GPU, where the processes of others cannot be seen."""
    kill_leftovers: bool = False
    """End what a user's own process has left on a GPU after its lease; what a job has left is ended in any case."""
    leftover_grace_s: float = 5.0
    """How long what is left has to end by itself."""
    manage_compute_mode: bool = False
    """Set EXCLUSIVE_PROCESS on a GPU for the time of a lease, and the former mode after it. Needs root."""
    log_bytes: int = LOG_BYTES
    """How much of each log file of a job stays on disk; its oldest part goes first."""
    keep_jobs: int = KEEP_JOBS
    """How many jobs that are over keep their directory, with logs; the oldest go first."""
    log_format: LogFormat = LogFormat.AUTO
    """The form of the worker's own log."""
    log_level: LogLevel = LogLevel.INFO
    """The least that is logged there."""
