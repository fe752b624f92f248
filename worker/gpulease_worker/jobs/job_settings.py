"""The settings of a worker that hold for each of its jobs: they go with the plan of its launch."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

LOG_BYTES = 256 * 2**20
"""How much of a log file stays on disk by default."""
MAX_PROCESSES = 32768
"""How many processes and threads a job may have by default: a fork bomb ends there, and no training comes near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(Noun):
    """What the settings of a worker say about each of its jobs."""

    log_bytes: int = LOG_BYTES
    """How much of each of its log files stays on disk."""
    max_processes: int = MAX_PROCESSES
    """How many processes and threads it may have; 0 for no limit."""
    memory_bytes: int = 0
    """How much memory it may use, where it has a cgroup; 0 for no limit."""
    no_new_privs: bool = False
    """Whether programs that it executes gain no privileges."""
    pam_service: str | None = None
    """The PAM service that opens a session for it, under a worker that runs as root; none where null."""
    open_files: int | None = None
    """Its soft limit of open files where none was submitted; that of its supervisor where null."""
    node: str | None = None
    """The node that it runs on; null in the order of an older release."""

    @property
    def cgroup_limits(self) -> dict[str, int]:
        """Limits of its cgroup, by file."""
        limits = {"pids.max": self.max_processes, "memory.max": self.memory_bytes}
        return {file: limit for file, limit in limits.items() if limit}
