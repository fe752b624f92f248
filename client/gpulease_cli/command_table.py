"""Every command of the program, by subject: its function and its summary.

The program's help is written from this table, so that neither `gpulease --help` nor one command imports the others. To
add a command, write a function in `gpulease_cli.commands` (see `status` for a short one) and a row here. A summary is
the beginning of the function's docstring, up to the first full stop or colon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Row(NamedTuple):
    """One command, or a group of commands."""

    summary: str
    """What it does, for the list of commands."""
    function: str = ""
    """`module:name` in `gpulease_cli.commands`. Empty for a group, and for what server and worker bring along."""
    below: Mapping[str, Row] = {}
    """The commands of a group."""


SUBJECTS: dict[str, dict[str, Row]] = {
    "Use GPUs now": {
        "run": Row("Lease GPUs, run a command on them, and release them", "run:run"),
        "shell": Row("Start a shell on leased GPUs; they are released when it ends", "run:shell"),
        "acquire": Row("Bind this shell to leased GPUs until it ends or `gpulease release`", "acquire:acquire"),
        "adopt": Row("Lease the GPUs that a running process of yours uses already, until it ends", "adopt:adopt"),
        "renew": Row("Extend leases by their full ttl from now", "acquire:renew"),
        "keep": Row("Say that idle GPUs of a lease are kept on purpose, until when and why", "keep:keep"),
        "release": Row("End leases and free their GPUs; queued requests are withdrawn", "acquire:release"),
    },
    "Jobs in the queue": {
        "submit": Row("Queue a job; the daemon launches it when its GPUs are free", "submit:submit"),
        "jobs": Row("List jobs, newest first; those of an array by index", "job_list:list_jobs"),
        "logs": Row("Show a job's output", "jobs:logs"),
        "metrics": Row(
            "Show GPU utilization, memory and power of a job, a lease or a GPU over time, and GPU-hours",
            "metrics:metrics",
        ),
        "wait": Row("Wait until jobs, or every job of an array, have ended", "jobs:wait"),
        "cancel": Row("End jobs, or all jobs of an array; queued jobs are withdrawn", "jobs:cancel"),
    },
    "Who has what, and why": {
        "status": Row("Show the GPUs, who holds each and until when, and who waits", "status:status"),
        "top": Row("Show GPUs, processes, jobs and the queue live", "top:top"),
        "queue": Row(
            "Show who waits, for what, since when, and when they are likely to start, where that is known",
            "queue:queue",
        ),
        "show": Row("Show everything about one job, array, lease, GPU or node", "show:show"),
        "leases": Row("List active and queued leases", "leases:list_leases"),
        "explain": Row("Explain why a lease or a job waits and what is in the way, or why it ended", "leases:explain"),
        "idle": Row("Show the leases whose GPUs do nothing, those that waste the most first", "idle:idle"),
        "usage": Row("Show GPU-hours held and used, by user, label, node, agent, session or day", "usage:usage"),
        "timeline": Row("Show who had which GPU when, and when a GPU could not be used", "timeline:timeline"),
        "events": Row("Show events, oldest first", "events:list_events"),
    },
    "The daemon and its host": {
        "serve": Row("Run the daemon, and a worker for this host"),
        "worker": Row("Run the worker of this host"),
        "setup": Row("Set up this host for all its users"),
        "doctor": Row("Look for problems on this host and say what to do"),
        "db": Row("The daemon's database"),
        "policy": Row("Try another order of the queue on recorded requests"),
        "config": Row(
            "The settings and where each comes from",
            below={
                "show": Row("Print every setting with its value and origin", "config:show"),
                "check": Row(
                    "Check a configuration file for unknown sections and keys, and for values that are not allowed",
                    "config:check",
                ),
            },
        ),
    },
    "Taking GPUs out of use": {
        "node": Row(
            "Show nodes, add them, take them out of use and put them back",
            below={
                "list": Row("List nodes and their state", "maintenance:list_nodes"),
                "drain": Row("Grant no more GPUs of a node; running work continues", "maintenance:drain"),
                "resume": Row(
                    "Put a node back into use; after a pause all its GPUs are read again", "maintenance:resume"
                ),
                "pause": Row(
                    "Drain a node and close NVML on it, for a GPU reset, a MIG change or a driver unload",
                    "maintenance:pause",
                ),
                "forget": Row("Forget a node whose host is off", "maintenance:forget"),
                "add": Row("Let another host join, and print the one command to run there", "node_add:add"),
                "join": Row("Make this host a node of a daemon elsewhere", "node_join:join"),
            },
        ),
        "gpu": Row(
            "List GPUs, take single ones out of use and put them back",
            below={
                "list": Row("List the GPUs with their UUIDs and state", "maintenance:list_gpus"),
                "cordon": Row("Stop granting a GPU; its current holder keeps it", "maintenance:cordon"),
                "uncordon": Row("Put a GPU back into use", "maintenance:uncordon"),
            },
        ),
    },
    "Nodes of a cluster": {
        "fleet": Row(
            "Run workers as jobs of Slurm or actors of Ray",
            below={
                "slurm": Row(
                    "Workers as jobs of Slurm",
                    below={
                        "up": Row("Keep workers running as jobs of Slurm, one for each node", "fleet:slurm_up"),
                        "status": Row("Show a pool and its workers", "fleet:slurm_status"),
                        "down": Row("End a pool", "fleet:slurm_down"),
                        "doctor": Row(
                            "Find cluster settings that would break a pool, and say how to fix them",
                            "fleet:slurm_doctor",
                        ),
                    },
                ),
                "ray": Row(
                    "Workers as actors of Ray",
                    below={
                        "up": Row(
                            "Keep workers running as actors of Ray, one for each node, with all its GPUs",
                            "fleet_ray:ray_up",
                        ),
                        "status": Row("Show a pool and its workers", "fleet_ray:ray_status"),
                        "down": Row("End a pool", "fleet_ray:ray_down"),
                        "doctor": Row(
                            "Find what would break a pool on the cluster, and say how to fix it", "fleet_ray:ray_doctor"
                        ),
                    },
                ),
            },
        ),
    },
    "Access": {
        "limits": Row(
            "What a user, a group or a token may have, and has",
            below={
                "set": Row("Set limits of a user, a group or a token; they end no lease", "limits:set_limits"),
                "show": Row("Show the limits of a user, a group or a token, and what is used of them", "limits:show"),
                "list": Row("List the limits that are set and what is used of them", "limits:list_limits"),
                "remove": Row("Remove the limits that were set for a user, a group or a token", "limits:remove"),
            },
        ),
        "reservations": Row(
            "GPUs that are kept for someone in a window of time",
            below={
                "add": Row("Keep GPUs for a user or a group in a window of time", "reservations:add"),
                "list": Row("List the reservations that have not ended", "reservations:list_reservations"),
                "cancel": Row("Take a reservation back; it ends no lease", "reservations:cancel"),
            },
        ),
        "mcp": Row("Serve GPUs to a coding agent over the Model Context Protocol, on stdin and stdout", "mcp:mcp"),
        "token": Row(
            "Bearer tokens for callers on other hosts",
            below={
                "create": Row("Create a token and print it; it cannot be shown again", "tokens:create"),
                "list": Row("List the tokens that have not been revoked, without their secrets", "tokens:list_tokens"),
                "revoke": Row("Revoke a token; it is refused from now on", "tokens:revoke"),
            },
        ),
    },
}
"""The program's commands by what one wants to do, as `gpulease --help` lists them."""
COMMANDS: dict[str, Row] = {name: row for rows in SUBJECTS.values() for name, row in rows.items()}
"""The same, by name."""
