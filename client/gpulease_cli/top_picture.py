"""What `gpulease top` draws: lines of text for a width, and their colors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from gpulease_cli import output, queue_table
from gpulease_cli.queue_table import queue_rows
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.model import Device, Gpu, JobState, Process
from gpulease_protocol.status_table import (
    align_columns,
    describe_end,
    describe_holder,
    describe_places,
    describe_state,
    describe_totals,
    format_duration,
    gibibytes,
    job_label,
    printable,
    short_id,
    short_model,
    shortened,
)

SORT_KEYS = ("gpu", "util", "memory", "user")
"""By what GPUs can be sorted."""
WIDE = 120
"""From this width on, bars are long and every column is there."""
MAX_ROWS = 200
"""Processes and jobs that are listed, at most."""
BAR = re.compile("[█▏▎▍▌▋▊▉]+|(?<=[|])#+")
SECTION = re.compile(r"^(?:GPU|NODE|PID|JOB|PLACE)  .*$", re.MULTILINE)
HEADING = re.compile(r"\A.*$", re.MULTILINE)
PARTS = " ▏▎▍▌▋▊▉"
"""A character by how many eighths of it are full."""


def heading(now: Snapshot | None, problem: str, sort: str, width: int) -> list[str]:
    """Host, time and totals; the keys; and what is wrong, where the picture is not current."""
    clock = f"{datetime.now().astimezone():%H:%M:%S}"
    if now is None:
        return [f"gpulease  {clock}", printable(problem, 300) or "asking the daemon ...", ""]
    names = sorted({node.name for node in now.nodes})
    host = printable(names[0], 30) if len(names) == 1 else f"{len(names)} nodes"
    if any(node.simulated for node in now.nodes):
        host += " (simulated)"
    keys = f"s: {sort}  q: quit"
    title = f"{host}  {clock}  {describe_totals(now.gpus, len(now.queue))}"
    room = width - len(title) - 2
    first = f"{title}  {keys:>{room}}" if room >= len(keys) else shortened(title, width)
    notes = []
    if problem:
        notes = [f"As of {now.at.astimezone():%H:%M:%S}: {printable(problem, 300)} Trying again."]
    elif now.problem:
        notes = [printable(now.problem, 500)]
    elif now.as_of is not None:
        notes = [f"This is a copy as of {now.as_of}; see gpulease doctor."]
    return [first, *notes, ""]


def lines(now: Snapshot, sort: str, width: int) -> list[str]:
    """GPUs with bars, their processes, the jobs that run, and the queue."""
    sections = [_gpus(now, sort, width), _processes(now, width), _jobs(now, width)]
    if now.queue:
        rows = queue_rows(now, short=True)
        sections.append(align_columns(queue_table.HEADS, rows, width, cut=queue_table.CUT, drop=queue_table.DROP))
    return "\n".join(section for section in sections if section).splitlines()


def paint(text: str) -> str:
    """The picture in color: heads of tables stand out, bars are green, states are as in `status`."""
    text = HEADING.sub(lambda found: output.styled(found[0], "bold"), text, count=1)
    text = SECTION.sub(lambda found: output.styled(found[0], "dim"), text)
    return output.colored(BAR.sub(lambda found: output.styled(found[0], "green"), text))


def bar(ratio: float | None, width: int) -> str:
    """A ratio as a bar of `width` characters; of ASCII ones where the terminal has no others."""
    if ratio is None:
        return "?".ljust(width)
    eighths = round(min(max(ratio, 0.0), 1.0) * width * 8)
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "|" + ("#" * round(eighths / 8 * (width - 1) / width)).ljust(width - 1, ".")
    full, part = divmod(eighths, 8)
    return ("█" * full + (PARTS[part] if part else "")).ljust(width, "·")


def _gpus(now: Snapshot, sort: str, width: int) -> str:
    leases, jobs = {lease.id: lease for lease in now.leases}, now.job_of_lease
    long = 20 if width >= WIDE else 8
    rows: list[tuple[str, ...]] = []
    for gpu in sorted(now.gpus, key=_order(sort)):
        lease, job = leases.get(gpu.lease_id or ""), jobs.get(gpu.lease_id or "")
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        share = used / total if used is not None and total else None
        rows.append(
            (
                gpu.node,
                str(gpu.index),
                short_model(gpu.name),
                f"{bar(gpu.utilization_ratio, long)} {_percent(gpu.utilization_ratio):>4}",
                f"{bar(share, long)} {gibibytes(used):>5}/{gibibytes(total)}",
                "?" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f}C",
                "?" if gpu.power_w is None else f"{gpu.power_w:.0f}W",
                describe_state(gpu, now.at),
                describe_holder(gpu.holder, job_label(job)),
                describe_end(lease, job, now.at),
            )
        )
    heads: tuple[str, ...] = (
        "NODE",
        "GPU",
        "NAME",
        "UTILIZATION",
        "MEMORY GiB",
        "TEMP",
        "POWER",
        "STATE",
        "HOLDER",
        "UNTIL",
    )
    drop = ("NAME", "UNTIL", "POWER", "TEMP")
    if not now.several_nodes:
        heads, rows = heads[1:], [row[1:] for row in rows]
    return align_columns(heads, rows, width, cut={"HOLDER": 16, "NODE": 8}, drop=drop) if rows else now.table(width)


def _order(sort: str) -> Callable[[Gpu], Any]:
    """The key to sort GPUs by: the busiest, the fullest, or by holder; otherwise in their own order."""

    def place(gpu: Gpu) -> tuple[Any, ...]:
        by = {
            "util": -(gpu.utilization_ratio or 0.0),
            "memory": -(gpu.memory_used_bytes or 0),
            "user": (gpu.holder.user or "~") if gpu.holder else "~",
        }
        return (by.get(sort, 0), gpu.node, gpu.index)

    return place


def _processes(now: Snapshot, width: int) -> str:
    """Each process once, with all of its GPUs and their memory; the largest first."""
    found: dict[tuple[str, int], tuple[Process, list[Gpu], int]] = {}
    for gpu in now.gpus:
        for process in gpu.processes:
            key = (gpu.node, process.pid)
            known, gpus, size = found.get(key, (process, [], 0))
            found[key] = (known, [*gpus, gpu], size + (process.memory_bytes or 0))
    ordered = sorted(found.values(), key=lambda item: (-item[2], item[0].pid))[:MAX_ROWS]
    rows = [
        (
            str(process.pid),
            process.user or "?",
            _places(now, gpus),
            f"{gibibytes(size)} GiB",
            _lease_name(now, process),
            process.command or "?",
        )
        for process, gpus, size in ordered
    ]
    heads = ("PID", "USER", "GPUS", "MEMORY", "LEASE", "COMMAND")
    return (
        align_columns(heads, rows, width, cut={"USER": 8, "LEASE": 12, "COMMAND": 16}, drop=("LEASE",)) if rows else ""
    )


def _lease_name(now: Snapshot, process: Process) -> str:
    if process.lease_id is None:
        return "-" if process.bystander else "none"
    return job_label(now.job_of_lease.get(process.lease_id)) or process.lease_id


def _jobs(now: Snapshot, width: int) -> str:
    jobs = [job for job in now.jobs if job.state is not JobState.QUEUED][:MAX_ROWS]
    rows = [
        (
            short_id(job.id),
            printable(job_label(job) or "", 60) if job.name else "-",
            job.user or "-",
            output.spelled(job.state),
            "-" if job.started_at is None else format_duration((now.at - job.started_at).total_seconds()),
            _places(now, job.gpus),
            " ".join(job.command) or "-",
        )
        for job in jobs
    ]
    heads = ("JOB", "NAME", "USER", "STATE", "TIME", "GPUS", "COMMAND")
    return align_columns(heads, rows, width, cut={"NAME": 10, "USER": 6, "COMMAND": 10}, drop=("USER",)) if rows else ""


def _places(now: Snapshot, gpus: Sequence[Device]) -> str:
    return describe_places(gpus, now.several_nodes)


def _percent(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.0%}"
