"""`gpulease node` and `gpulease gpu`: drain, pause, forget and cordon."""

from __future__ import annotations

import time

import click

from gpulease.client import Client
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import Field
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_protocol.model import Gpu, Node, NodeMode
from gpulease_protocol.node_protocol import PAUSED
from gpulease_protocol.node_requests import DrainRequest
from gpulease_protocol.status_table import align_columns, gibibytes, short_model

NVML_CLOSE_S = 10.0
"""How long `pause` waits for the worker to report that it has closed NVML."""
POLL_S = 0.1

REASON = option(
    "--reason",
    type=Field(click.STRING, DrainRequest, "reason"),
    metavar="TEXT",
    help="Shown to users who wait, such as 'driver update till 15:00'.",
)
NODE = argument("name", metavar="NAME", help="Name of the node.", shell_complete=id_completion.nodes)
GPU = argument(
    "gpu",
    metavar="GPU",
    help="UUID or a prefix of it, or NODE:INDEX; INDEX alone if there is one node.",
    shell_complete=id_completion.gpus,
)


@command("list", examples=("gpulease node list",))
@JSON
def list_nodes(json: bool) -> None:
    """List nodes and their state."""
    with Client() as client:
        nodes = client.nodes()
    if json:
        output.print_json_list(nodes)
        return
    heads = ("NODE", "STATE", "MODE", "GPUS", "DRIVER", "UNTIL", "REASON")
    rows = [
        (
            node.name,
            node.state.value,
            node.mode.value,
            str(node.gpu_count),
            node.driver_version or "?",
            "-" if node.available_until is None else f"{node.available_until.astimezone():%Y-%m-%d %H:%M}",
            _out_of_use(node) or "-",
        )
        for node in nodes
    ]
    drop = () if any(node.available_until for node in nodes) else ("UNTIL",)
    kept = [place for place, head in enumerate(heads) if head not in drop]
    output.print_table(
        align_columns([heads[place] for place in kept], [[row[place] for place in kept] for row in rows])
    )


@command(examples=("gpulease node drain gpubox", "gpulease node drain gpubox --reason 'driver update till 15:00'"))
@NODE
@REASON
@JSON
def drain(name: str, reason: str | None, json: bool) -> None:
    """Grant no more GPUs of a node; running work continues."""
    with Client() as client:
        _print_node(client.drain_node(name, reason), json)


@command(examples=("gpulease node resume gpubox",))
@NODE
@JSON
def resume(name: str, json: bool) -> None:
    """Put a node back into use; after a pause all its GPUs are read again."""
    with Client() as client:
        _print_node(client.resume_node(name), json)


@command(examples=("gpulease node pause gpubox",))
@NODE
@option("--force", is_flag=True, help="Pause even if leases are active; they stay.")
@REASON
@JSON
def pause(name: str, force: bool, reason: str | None, json: bool) -> int:
    """Drain a node and close NVML on it, for a GPU reset, a MIG change or a driver unload."""
    until_s = time.monotonic() + NVML_CLOSE_S
    with Client() as client:
        node = client.pause_node(name, force, reason)
        while node.mode is NodeMode.PAUSED and node.reason != PAUSED and time.monotonic() < until_s:
            time.sleep(POLL_S)
            node = client.node(name)
    _print_node(node, json)
    if node.reason == PAUSED:
        return output.DONE
    output.print_error(
        "NVML may still be open",
        f"the worker of {name} did not report within {NVML_CLOSE_S:g} s that it has closed NVML",
        "check that this worker runs; `gpulease node list` shows when it has",
    )
    return output.REFUSED


@command(examples=("gpulease node forget oldbox",))
@NODE
@JSON
def forget(name: str, json: bool) -> None:
    """Forget a node whose host is off: end its jobs and leases; jobs with a retry left start elsewhere."""
    with Client() as client:
        node = client.forget_node(name)
    if json:
        output.print_json(node)
    else:
        click.echo(f"node {node.name} is forgotten, with {node.gpu_count} GPU{'' if node.gpu_count == 1 else 's'}")


@command("list", examples=("gpulease gpu list",))
@JSON
def list_gpus(json: bool) -> None:
    """List the GPUs with their UUIDs and state."""
    with Client() as client:
        gpus = client.gpus()
    if json:
        output.print_json_list(gpus)
        return
    heads = ("NODE", "GPU", "STATE", "UUID", "NAME", "MEMORY")
    rows = [
        (
            gpu.node,
            str(gpu.index),
            gpu.state.value,
            gpu.uuid,
            short_model(gpu.name),
            f"{gibibytes(gpu.memory_total_bytes)} GiB",
        )
        for gpu in gpus
    ]
    output.print_table(align_columns(heads, rows, output.terminal_width(), cut={"NODE": 8}, drop=("MEMORY", "NAME")))


@command(examples=("gpulease gpu cordon GPU-bf4c", "gpulease gpu cordon gpubox:3"))
@GPU
@JSON
def cordon(gpu: str, json: bool) -> None:
    """Stop granting a GPU; its current holder keeps it."""
    with Client() as client:
        _print_gpu(client.cordon_gpu(names.find_gpu(client, gpu).uuid), json)


@command(examples=("gpulease gpu uncordon gpubox:3",))
@GPU
@JSON
def uncordon(gpu: str, json: bool) -> None:
    """Put a GPU back into use."""
    with Client() as client:
        _print_gpu(client.cordon_gpu(names.find_gpu(client, gpu).uuid, cordoned=False), json)


def _out_of_use(node: Node) -> str:
    """Why a node is not used: what its worker says, what an administrator says."""
    said = f"{node.mode_by}: {node.mode_reason}" if node.mode_by and node.mode_reason else node.mode_reason
    return "; ".join(filter(None, (node.reason, "leaves" if node.leaving else None, said)))


def _print_node(node: Node, json: bool) -> None:
    if json:
        output.print_json(node)
    else:
        reason = _out_of_use(node)
        click.echo(f"node {node.name} is {node.mode.value}{f' ({reason})' if reason else ''}")


def _print_gpu(gpu: Gpu, json: bool) -> None:
    if json:
        output.print_json(gpu)
    else:
        state, reason = gpu.state.value, f"{gpu.reason[:1].lower()}{gpu.reason[1:]}" if gpu.reason else ""
        said = reason if reason.startswith(state) else ": ".join(filter(None, (state, reason)))
        click.echo(f"GPU {gpu.index} of {gpu.node} is {said}")
