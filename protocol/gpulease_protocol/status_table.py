"""The state of everything as plain text, for `gpulease status` and for `curl` on the daemon's root."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpulease_protocol.model import (
    Activity,
    Demand,
    Device,
    Gpu,
    GpuState,
    Holder,
    Job,
    Lease,
    LeaseState,
    Liveness,
    Node,
    NodeState,
    Priority,
    Selection,
    TopologyMode,
)

if TYPE_CHECKING:
    from gpulease_protocol.reservations import Reservation

GIB = 1024**3
IDLE_SHOWN_S = 60.0
"""From then on it is said for how long a leased GPU has been idle."""
MAX_RESERVED = 3
"""How many of the reservations that have begun are shown for a node."""
MAX_RESERVED_NODES = 8
"""How many nodes are shown with their reservations."""
ELLIPSIS = "…"
MODEL_NOISE = re.compile(r"^(NVIDIA |Tesla |GeForce )+| HBM\d\w*$| Generation$")
"""What product names have in common, and what no one chooses a GPU by."""


def render_status(
    gpus: Sequence[Gpu],
    leases: Sequence[Lease],
    jobs: Sequence[Job],
    now: datetime,
    nodes: Sequence[Node] = (),
    *,
    width: int | None = None,
    more_waiting: int = 0,
    reservations: Sequence[Reservation] = (),
) -> str:
    """The GPUs with who holds each and until when, why others are not free, reservations, the queue, and the totals.

    `leases` needs no ended ones, `jobs` only those of these leases; `nodes` that are unknown are named with the reason.
    With `width` the text is made to fit a terminal with so many columns; without, nothing is cut. `more_waiting`
    requests are counted but not listed. `reservations`, as they begin: of each node what is reserved now and next is
    told. Ends in a newline.
    """
    by_id = {lease.id: lease for lease in leases}
    job_of = {job.lease_id: job for job in jobs}
    several_nodes = len({gpu.node for gpu in gpus}) > 1
    ordered = sorted(gpus, key=lambda gpu: (gpu.node, gpu.index))
    heads: tuple[str, ...] = ("GPU", "NAME", "MEMORY", "UTIL", "STATE", "HOLDER", "UNTIL")
    rows = [_gpu_row(gpu, by_id.get(gpu.lease_id or ""), job_of.get(gpu.lease_id or ""), now) for gpu in ordered]
    if several_nodes:
        heads, rows = ("NODE", *heads), [(gpu.node, *row) for gpu, row in zip(ordered, rows, strict=True)]
    fit, least_important = {"NODE": 8, "HOLDER": 14}, ("NAME", "MEMORY", "UTIL", "UNTIL")
    text = align_columns(heads, rows, width, cut=fit, drop=least_important) if rows else _without_gpus(nodes)
    unknown = {node.name: node.reason for node in nodes if node.state is NodeState.UNKNOWN}
    # What the line of a node says is not said again of its GPUs.
    others = [gpu for gpu in ordered if gpu.state is not GpuState.UNKNOWN or gpu.reason != _of_gpus(unknown, gpu.node)]
    notes = [f"{place}: {reason}" for place, reason in _why_not_free(others, several_nodes)]
    notes += [
        f"Node {name} is unknown: {printable(reason or 'no reason was given', 300)}" for name, reason in unknown.items()
    ]
    notes += describe_reserved(reservations, now, several_nodes)
    text += "".join(wrapped(note, width) for note in notes)
    queued = (lease for lease in leases if lease.state is LeaseState.QUEUED)
    # One without a place waits for other jobs, and joins the queue at its end.
    waiting = sorted(queued, key=lambda lease: (lease.position is None, lease.position or 0))
    if waiting:
        text += "\n" + _queue(waiting, job_of, now, width)
    if more_waiting:
        text += wrapped(f"{more_waiting} more wait; `gpulease leases` lists them.", width)
    totals = wrapped(describe_totals(gpus, len(waiting) + more_waiting, nodes), width)
    return text + (f"\n{totals}" if gpus else "")


def describe_totals(gpus: Sequence[Gpu], waiting: int, nodes: Sequence[Node] = ()) -> str:
    """How many GPUs are free and how many requests wait; and which nodes are simulated."""
    free = sum(gpu.state is GpuState.FREE for gpu in gpus)
    simulated = [printable(node.name) for node in nodes if node.simulated]
    note = f" ({', '.join(simulated)}: simulated)" if simulated else ""
    return f"{free} of {count_gpus(len(gpus))} free, {waiting} waiting{note}"


def _queue(waiting: Sequence[Lease], jobs: Mapping[str, Job], now: datetime, width: int | None) -> str:
    rows = [
        (
            str(lease.position or "-"),
            describe_holder(lease.holder, job_label(jobs.get(lease.id))),
            describe_demand(lease.demand),
            format_duration((now - lease.created_at).total_seconds()),
            lease.id if width is None else short_id(lease.id),
        )
        for lease in waiting
    ]
    heads = ("QUEUE", "WHO", "WANTS", "WAITING", "LEASE")
    return align_columns(heads, rows, width, cut={"WHO": 14, "WANTS": 12}, drop=("LEASE",))


def _of_gpus(unknown: Mapping[str, str | None], node: str) -> str | None:
    """The reason of each GPU of a node that is unknown; None without one."""
    reason = unknown.get(node)
    return f"Unknown: {reason}" if reason else None


def _why_not_free(gpus: Sequence[Gpu], several_nodes: bool) -> list[tuple[str, str]]:
    """Which GPUs are neither leased nor free, or are held for a request, and why; those of one reason together."""
    places: dict[tuple[str, str], list[int]] = {}
    for gpu in gpus:
        if gpu.reason and gpu.state is not GpuState.LEASED:
            places.setdefault((gpu.node, printable(gpu.reason, 300)), []).append(gpu.index)
    return [
        (f"GPU{'s' if len(indices) > 1 else ''} {format_indices(indices)}{f' of {node}' if several_nodes else ''}", why)
        for (node, why), indices in places.items()
    ]


def describe_reserved(reservations: Iterable[Reservation], now: datetime, several_nodes: bool) -> list[str]:
    """For each node what is reserved there now, and what next. `reservations` as they begin."""
    by_node: dict[str, list[Reservation]] = {}
    for one in reservations:
        for node in {device.node: None for device in one.gpus} if one.to_at > now else ():
            by_node.setdefault(node, []).append(one)
    found = []
    for node, of_node in sorted(by_node.items())[:MAX_RESERVED_NODES]:
        begun = [one for one in of_node if one.from_at <= now]
        says = [
            f"{_reserved(one, node)} for another {format_duration((one.to_at - now).total_seconds())}"
            for one in begun[:MAX_RESERVED]
        ]
        if len(begun) > MAX_RESERVED:
            says.append(f"{len(begun) - MAX_RESERVED} more")
        if len(of_node) > len(begun):
            following = of_node[len(begun)]
            in_s, lasts_s = following.from_at - now, following.to_at - following.from_at
            lasts = format_duration(lasts_s.total_seconds())
            says.append(f"{_reserved(following, node)} in {format_duration(in_s.total_seconds())}, for {lasts}")
        found.append(f"Reserved{f' on {printable(node)}' if several_nodes else ''}: {'; '.join(says)}")
    if len(by_node) > MAX_RESERVED_NODES:
        more = len(by_node) - MAX_RESERVED_NODES
        found.append(f"Reserved on {more} more node{'s'[: more - 1]}: `gpulease reservations list` has all.")
    return found


def _reserved(one: Reservation, node: str) -> str:
    """Which GPUs of a node are reserved, and for whom: `GPUs 0-3 for ada`."""
    indices = [device.index for device in one.gpus if device.node == node]
    whom = f"@{one.group}" if one.group is not None else one.user or "?"
    return f"GPU{'s' if len(indices) > 1 else ''} {format_indices(indices)} for {printable(whom)}"


def _without_gpus(nodes: Sequence[Node]) -> str:
    """Why the table is empty."""
    if not nodes:
        return (
            "No GPUs are known: no worker has reported. On the host with the GPUs: systemctl status gpulease-worker"
            " (or start one: gpulease worker --url URL)\n"
        )
    ready = [node.name for node in nodes if node.state is NodeState.READY]
    return "No GPUs are known." + (f" There are none on {', '.join(ready)}." if ready else "") + "\n"


def align_columns(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    *,
    cut: Mapping[str, int] | None = None,
    drop: Sequence[str] = (),
) -> str:
    """Rows under heads, aligned, two spaces apart; characters that could steer a terminal are shown as `?`.

    With `width`, columns of `cut` become narrower, at most to the width that it gives, until the lines fit; then
    columns of `drop` are left out, the first one first. What is still too long is cut at the end of its line.
    """
    lines = [tuple(heads), *(tuple(printable(cell, 200) for cell in row) for row in rows)]
    places, left = list(range(len(heads))), [heads.index(head) for head in drop if head in heads]
    natural = [max(display_width(line[place]) for line in lines) for place in range(len(heads))]
    least = [min(wide, (cut or {}).get(head, wide)) for head, wide in zip(heads, natural, strict=True)]
    while width is not None and left and sum(least[place] + 2 for place in places) - 2 > width:
        places.remove(left.pop(0))
    widths = {place: natural[place] for place in places}
    while width is not None and sum(wide + 2 for wide in widths.values()) - 2 > width:
        wide, widest = max((widths[place] - least[place], place) for place in places)
        if wide == 0:
            break
        widths[widest] -= 1
    aligned = ("  ".join(_padded(line[place], widths[place]) for place in places).rstrip() for line in lines)
    return "".join((line if width is None else shortened(line, width)) + "\n" for line in aligned)


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` columns of a terminal, with an ellipsis where it was cut."""
    if display_width(text) <= width:
        return text
    while text and display_width(text) >= width:
        text = text[:-1]
    return text.rstrip() + ELLIPSIS


def wrapped(text: str, width: int | None) -> str:
    """`text` on as many lines as it needs, the further ones indented; on one line without a width."""
    return textwrap.fill(text, max(width, 20), subsequent_indent="  ") + "\n" if width else text + "\n"


def display_width(text: str) -> int:
    """How many columns of a terminal a text takes: two for each character of East Asian scripts."""
    return len(text) if text.isascii() else sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


def _padded(text: str, width: int) -> str:
    text = shortened(text, width)
    return text + " " * (width - display_width(text))


def printable(text: str, limit: int = 60) -> str:
    """`text` on one line of at most `limit` characters, every one printable."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def count_gpus(count: int) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def short_id(record_id: str) -> str:
    """The beginning of an id, long enough for every command: `lease-3e1f8e2a`."""
    kind, dash, digits = record_id.partition("-")
    return f"{kind}{dash}{digits[:8]}"


def format_indices(indices: Iterable[int]) -> str:
    """Indices in a few characters: `0-3, 6`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def describe_places(gpus: Iterable[Device], several_nodes: bool) -> str:
    """GPUs by index, with their node where there are several: `0-3`, `n1:0-3, n2:1`; `-` for none."""
    nodes: dict[str, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, []).append(gpu.index)
    return (
        ", ".join((f"{node}:" if several_nodes else "") + format_indices(found) for node, found in nodes.items()) or "-"
    )


def short_model(name: str | None) -> str:
    """A product name without what all have in common: `H100 80GB`, `RTX 4090`; `?` where it is not known."""
    return MODEL_NOISE.sub("", name or "") or "?"


def job_label(job: Job | None) -> str | None:
    """What a job is called: its name, with its index in an array, else its id."""
    if job is None:
        return None
    if not job.name:
        return job.id
    return job.name if job.array_index is None else f"{job.name}[{job.array_index}]"


def describe_holder(holder: Holder | None, job: str | None = None) -> str:
    """A holder in a few words: user, label or job, process."""
    if holder is None:
        return "-"
    label = "" if job and holder.label and job.startswith(holder.label) else holder.label
    parts = [holder.user or holder.host or "", label and f"({printable(label, 30)})"]
    if job:
        parts.append(printable(job, 30) if job.startswith("job-") else f"job {printable(job, 30)}")
    elif holder.owner_pid:
        parts.append(f"pid {holder.owner_pid}")
    return " ".join(part for part in parts if part) or "?"


def describe_demand(demand: Demand) -> str:
    """A demand in a few words."""
    names = [*map(str, demand.indices), *(uuid[:12] for uuid in demand.uuids)]
    what = {
        Selection.COUNT: count_gpus(demand.count),
        Selection.LISTED: f"GPU{'s' if len(names) > 1 else ''} {', '.join(names)}",
        Selection.ALL: "a whole node",
        Selection.AUTO: "every free GPU",
    }[demand.selection]
    if demand.nodes > 1:
        most = "" if demand.max_nodes is None else f" to {demand.max_nodes}"
        what += f" on each of {demand.nodes}{most} nodes"
    if demand.min_free_memory_bytes:
        what += f" with {gibibytes(demand.min_free_memory_bytes)} GiB free"
    if demand.node:
        what += f" on {demand.node}"
    if demand.topology is TopologyMode.REQUIRED:
        what += ", NVLink between all"
    if demand.priority is not Priority.NORMAL:
        what += f", {demand.priority}"
    if demand.preemptible and demand.priority is not Priority.SCAVENGE:
        what += ", preemptible"
    return what + (f", model contains {demand.gpu_model}" if demand.gpu_model else "")


def format_duration(seconds: float) -> str:
    """A length of time in its two largest units: `42s`, `3m 05s`, `2h 10m`, `3d 4h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def format_age(seconds: float) -> str:
    """A length of time in its largest unit: `42s`, `3m`, `2h`, `3d`."""
    return format_duration(seconds).split()[0]


def gibibytes(size_bytes: int | None) -> str:
    """A size in GiB with one digit, `?` where it is not known."""
    return "?" if size_bytes is None else f"{size_bytes / GIB:.1f}"


def describe_state(gpu: Gpu, now: datetime) -> str:
    """The state's word; with what happens on a leased GPU, and that a free one is held for a request."""
    if gpu.state is GpuState.FREE and gpu.reason:
        return "free (held)"
    if gpu.state is not GpuState.LEASED or gpu.activity is None:
        return gpu.state.value
    idle_s = (now - gpu.last_busy_at).total_seconds() if gpu.last_busy_at else 0.0
    if gpu.activity is Activity.STARTING:
        return "leased (unused)"
    if gpu.activity is Activity.IDLE and idle_s > IDLE_SHOWN_S:
        return f"leased (idle {format_age(idle_s)})"
    return f"leased ({gpu.activity.value})"


def describe_end(lease: Lease | None, job: Job | None, now: datetime) -> str:
    """Until when a lease holds its GPUs: a process or job that ends, or a time. What ends it for others comes first."""
    if lease is None or lease.state is not LeaseState.ACTIVE:
        return "-"
    if lease.preempt_at is not None:
        return "preempted in " + format_duration((lease.preempt_at - now).total_seconds())
    if lease.reclaim_at is not None:
        return "taken back in " + format_duration((lease.reclaim_at - now).total_seconds())
    if lease.liveness is Liveness.JOB:
        if job is None or job.timeout_s is None or job.started_at is None:
            return "its job ends"
        left = job.started_at + timedelta(seconds=job.timeout_s) - now
        for last in job.attempt_history[-1:]:
            if last.regrouped and last.ended_at is not None and lease.granted_at is not None:
                left -= last.ended_at - lease.granted_at  # an attempt after nodes have changed has what is left
        return f"in at most {format_duration(left.total_seconds())}"
    watched, until, most = lease.liveness is Liveness.PROCESS, lease.expires_at, lease.ends_at
    if most is not None and (watched or until is None or most <= until):
        return f"in at most {format_duration((most - now).total_seconds())}"
    if watched:
        return f"pid {lease.holder.owner_pid} ends" if lease.holder.owner_pid else "its process ends"
    return "-" if until is None else "in " + format_duration((until - now).total_seconds())


def describe_kept(lease: Lease, now: datetime) -> str | None:
    """For how long yet the idle GPUs of a lease are kept on purpose, and why; None where they are not."""
    if lease.kept is None:
        return None
    left_s = max(0.0, (lease.kept.until - now).total_seconds())
    by = f" ({printable(lease.kept.by)})" if lease.kept.by and lease.kept.by != lease.holder.user else ""
    return f"for {format_duration(left_s)}: {printable(lease.kept.reason, 500)}{by}"


def _gpu_row(gpu: Gpu, lease: Lease | None, job: Job | None, now: datetime) -> tuple[str, ...]:
    holder, until = gpu.holder, describe_end(lease, job, now)
    if holder is not None and until == f"pid {holder.owner_pid} ends" and (holder.user or holder.host):
        holder = replace(holder, owner_pid=None)  # named once is enough
    return (
        str(gpu.index),
        short_model(gpu.name),
        f"{gibibytes(gpu.memory_used_bytes)}/{gibibytes(gpu.memory_total_bytes)} GiB",
        "?" if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
        describe_state(gpu, now),
        describe_holder(holder, job_label(job)),
        until,
    )
