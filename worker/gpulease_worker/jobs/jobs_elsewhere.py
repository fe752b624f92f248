"""Finds the jobs of this host that have their records in another data directory than this worker's.

A worker that is started with another `--data-dir` knows nothing of the jobs that run. The daemon would take them for
lost, and what is left of them would be ended. So the worker names them in its reports until the daemon has taken one
in, and the daemon takes none in while one of them is a job of this node.

A supervisor has the lock of its job's directory open, which names job and directory. Only those of this worker's own
user count: any other process may open any file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host.process_tree import all_pids
from gpulease_protocol.node_protocol import JobElsewhere, parse_attempt_name
from gpulease_worker.processes import procfs

SUPERVISOR = "gpulease_worker.jobs."
"""In the command line of every supervisor: of the program, or of the fork server that it was forked from."""
LOCK = re.compile(r"(?P<data_dir>/.*)/jobs/(?P<name>[^/]+)/lock")
MAX_JOBS = 1000
"""So many are named at most: one is enough to refuse a report."""


def find(data_dir: Path) -> tuple[JobElsewhere, ...]:
    """The jobs that run on this host, as this worker's user, and that are not in its data directory (absolute)."""
    own = os.path.realpath(data_dir)
    mine = [pid for pid in all_pids() if procfs.real_uid(pid) == os.getuid()]
    supervisors = [pid for pid, command in procfs.commands(mine).items() if SUPERVISOR in command]
    found = {one.group("name"): one.group("data_dir") for pid in supervisors for one in _locks(pid)}
    others = [(name, there) for name, there in sorted(found.items()) if there != own]
    attempts = [(*parse_attempt_name(name), there) for name, there in others[:MAX_JOBS]]
    return tuple(JobElsewhere(job_id=job_id, attempt=attempt, data_dir=there) for job_id, attempt, there in attempts)


def _locks(pid: int) -> Iterator[re.Match[str]]:
    with suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if found := LOCK.fullmatch(os.readlink(descriptor.path)):
                    yield found
