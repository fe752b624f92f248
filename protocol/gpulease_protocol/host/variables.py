"""The environment variables of gpulease. Any other name with its prefix is a mistake, and has no effect.

A test compares the list with what the code reads. What a lease or a job sets is known by its beginning, because a newer
daemon may set more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

URL, TOKEN, CONFIG = "GPULEASE_URL", "GPULEASE_TOKEN", "GPULEASE_CONFIG"
TOKEN_FILE = "GPULEASE_TOKEN_FILE"  # noqa: S105 - its name
DAEMON_USER, CA_FILE = "GPULEASE_DAEMON_USER", "GPULEASE_CACERT"
KNOWN = frozenset(
    """
    ADDRESS ADMINS AGENT ALLOCATION ALLOCATION_POLL_S BEHIND_PROXY CACERT CALL_DEADLINE_S CGROUPS CONFIG
    CORS_ORIGINS DAEMON_USER DATABASE_URL DATA_DIR DESKTOP_NAMES DEVICE_FILES EASY_BACKFILL FAIR_SHARE FLEET_DIR
    FOUND_BY GPUS GPUS_PER_NODE GPU_WEIGHTS GROUP_SHARES HEALTH_S IDLE_AFTER_S IDLE_COMMAND IDLE_GPUS IDLE_HOST
    IDLE_JOB_ID IDLE_LABEL IDLE_LEASE_ID IDLE_MEMORY_BYTES IDLE_NODE IDLE_RECLAIM_AT IDLE_S IDLE_USER
    JOB_MEMORY_BYTES JOB_PIDS KEEP_DAYS KEEP_ENDED KEEP_EVENTS KEEP_JOBS KILL_LEFTOVERS LEAVE_S LISTEN_HOST
    LISTEN_PORT LOG_BYTES LOG_FORMAT LOG_LEVEL MANAGE_COMPUTE_MODE MAX_BYPASS MAX_BYPASS_S MAX_GPUS_PER_USER
    MAX_INTERACTIVE_GPUS MAX_INTERACTIVE_S MAX_KEEP_S MAX_LEASES_PER_USER MAX_OBSERVATION_AGE_S MAX_OVERTAKES
    MAX_QUEUE_BYTES_PER_USER MAX_QUEUE_PER_USER MAX_RPS_PER_USER MONITOR_NAMES NODE NODES NODE_LOST_AFTER_S
    NO_NEW_PRIVS PAM_SERVICE PARENT_PID PCI_DEVICES PEERS PLAIN_HTTP POLL_S PREEMPTION PREEMPT_AFTER_S
    PREEMPT_NOTICE_S PROBE_DEADLINE_S PROCESSES_S RECLAIM_IDLE_INTERACTIVE_AFTER_S RETAINED_MEMORY_S SESSION
    SHOW_COMMANDS SIMULATE SOCKET SOCKET_MODE STANDBY START_DEADLINE_S TLS_AUTO TLS_CERT TLS_KEY TLS_NAMES TOKEN
    TOKEN_FILE URL USAGE_HALF_LIFE_DAYS WAIT_S WORKER WORKER_DIR
    """.split()  # noqa: SIM905 - one name on each line would be seventy
)
"""Names after `GPULEASE_`."""
SET_BY_LEASES = re.compile(r"GPULEASE(_(LEASE|JOB|ARRAY|MEMBER|TEST)_\w+|_NODES|_GPUS_PER_NODE)?")
"""Variables that a lease, a job or a test sets."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that looks as if gpulease read it, and which it does not."""
    names = (name for name in environ if name.startswith("GPULEASE_") and not SET_BY_LEASES.fullmatch(name))
    return [_sentence(name) for name in sorted(names) if name.removeprefix("GPULEASE_") not in KNOWN]


def _sentence(name: str) -> str:
    import difflib  # noqa: PLC0415 - after a slip only

    near = difflib.get_close_matches(name.removeprefix("GPULEASE_"), KNOWN, 1, 0.7)
    meant = f" Did you mean GPULEASE_{near[0]}?" if near else ""
    return f"{name} is no variable of gpulease and has no effect.{meant}"
