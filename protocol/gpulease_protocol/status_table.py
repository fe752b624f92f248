"""The state of everything as plain text, for `gpulease status` and for `curl` on the daemon's root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from gpulease_protocol.model import Demand, Gpu, GpuState, Holder, Job, Lease, LeaseState, Node, NodeState, Selection

GIB = 1024**3


def render_status(
    gpus: Sequence[Gpu], leases: Sequence[Lease], jobs: Sequence[Job], now: datetime, nodes: Sequence[Node] = ()
) -> str:
    """Two aligned tables: the GPUs, with who holds each and for how long yet, and below them the queue.

    `leases` needs no ended ones, `jobs` only those of these leases; `nodes` that are unknown are named with the reason.
    Ends in a newline.
    """
    by_id = {lease.id: lease for lease in leases}
    names = {job.lease_id: job.name or job.id for job in jobs}
    several_nodes = len({gpu.node for gpu in gpus}) > 1
    heads: tuple[str, ...] = ("GPU", "NAME", "MEMORY", "UTIL", "STATE", "HOLDER", "UNTIL")
    if any(gpu.reason and gpu.state is not GpuState.LEASED for gpu in gpus):
        heads += ("WHY NOT FREE",)
    rows = [
        ((gpu.node,) if several_nodes else ()) + _gpu_row(gpu, by_id.get(gpu.lease_id or ""), names, now)[: len(heads)]
        for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.index))
    ]
    text = align_columns((("NODE",) if several_nodes else ()) + heads, rows) if rows else _without_gpus(nodes)
    text += "".join(
        f"Node {node.name} is unknown: {printable(node.reason or 'no reason was given', 300)}\n"
        for node in nodes
        if node.state is NodeState.UNKNOWN
    )
    waiting = sorted(
        (lease for lease in leases if lease.state is LeaseState.QUEUED), key=lambda lease: lease.position or 0
    )
    if waiting:
        text += "\n" + align_columns(
            ("QUEUE", "WHO", "WANTS", "WAITING", "LEASE"),
            [
                (
                    str(lease.position or "-"),
                    describe_holder(lease.holder, names.get(lease.id)),
                    describe_demand(lease.demand),
                    format_duration((now - lease.created_at).total_seconds()),
                    lease.id,
                )
                for lease in waiting
            ],
        )
    return text


def _without_gpus(nodes: Sequence[Node]) -> str:
    """Why the table is empty."""
    if not nodes:
        start = "Start one on each host with GPUs: gpulease worker --url URL"
        return f"No GPUs are known: no worker has reported yet. {start}\n"
    ready = [node.name for node in nodes if node.state is NodeState.READY]
    return "No GPUs are known." + (f" There are none on {', '.join(ready)}." if ready else "") + "\n"


def align_columns(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under heads, aligned, two spaces apart; characters that could steer a terminal are shown as `?`."""
    lines = [tuple(heads), *(tuple(printable(cell, 200) for cell in row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def printable(text: str, limit: int = 60) -> str:
    """`text` on one line of at most `limit` characters, every one printable."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def describe_holder(holder: Holder | None, job: str | None = None) -> str:
    """A holder in a few words: user, label or job, process."""
    if holder is None:
        return "-"
    label = holder.label if holder.label != job else ""
    parts = [holder.user or holder.host or "", label and f"({printable(label, 30)})"]
    parts.append(f"job {printable(job, 30)}" if job else f"pid {holder.owner_pid}" if holder.owner_pid else "")
    return " ".join(part for part in parts if part) or "?"


def describe_demand(demand: Demand) -> str:
    """A demand in a few words."""
    what = {
        Selection.COUNT: f"{demand.count} GPU{'s' if demand.count != 1 else ''}",
        Selection.LISTED: "GPUs " + ", ".join([*map(str, demand.indices), *(uuid[:12] for uuid in demand.uuids)]),
        Selection.ALL: "a whole node",
        Selection.AUTO: "every free GPU",
    }[demand.selection]
    if demand.min_free_memory_bytes:
        what += f" with {gibibytes(demand.min_free_memory_bytes)} GiB free"
    if demand.node:
        what += f" on {demand.node}"
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


def gibibytes(size_bytes: int | None) -> str:
    """A size in GiB with one digit, `?` where it is not known."""
    return "?" if size_bytes is None else f"{size_bytes / GIB:.1f}"


def _state(gpu: Gpu) -> str:
    """The state's word, with the activity of a leased GPU; a free one that is held for a request says so."""
    more = gpu.activity.value if gpu.state is GpuState.LEASED and gpu.activity else ""
    if gpu.state is GpuState.FREE and gpu.reason:
        more = "held"
    return f"{gpu.state.value} ({more})" if more else gpu.state.value


def _gpu_row(gpu: Gpu, lease: Lease | None, names: dict[str, str], now: datetime) -> tuple[str, ...]:
    leased = gpu.state is GpuState.LEASED
    until = lease.expires_at if lease and lease.state is LeaseState.ACTIVE else None
    return (
        str(gpu.index),
        gpu.name or "?",
        f"{gibibytes(gpu.memory_used_bytes)} / {gibibytes(gpu.memory_total_bytes)} GiB",
        "?" if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
        _state(gpu),
        describe_holder(gpu.holder, names.get(gpu.lease_id or "")),
        "in " + format_duration((until - now).total_seconds()) if until else "-",
        "" if leased else printable(gpu.reason or "", 200),
    )
