"""`gpulease node` and `gpulease gpu`: drain, pause, forget and cordon."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.options import Json
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.model import Gpu, Node, NodeMode
from gpulease_protocol.node_protocol import PAUSED
from gpulease_protocol.status_table import align_columns

NVML_CLOSE_S = 10.0
"""How long `pause` waits for the worker to report that it has closed NVML."""
POLL_S = 0.1
MIN_UUID_DIGITS = 4
"""Shortest accepted prefix of a UUID: an index that does not exist must not be taken for one."""

NodeName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")]
GpuName = Annotated[
    str, typer.Argument(metavar="GPU", help="UUID or a prefix of it, or NODE:INDEX; INDEX alone if there is one node.")
]


def list_nodes(json: Json = False) -> None:
    """List nodes and their state."""
    with Client() as client:
        nodes = client.nodes()
    if json:
        output.print_json_list(nodes)
        return
    heads = ("NODE", "STATE", "MODE", "GPUS", "DRIVER", "REASON")
    rows = [
        (
            node.name,
            node.state.value,
            node.mode.value,
            str(node.gpu_count),
            node.driver_version or "?",
            node.reason or "-",
        )
        for node in nodes
    ]
    output.print_table(align_columns(heads, rows))


def drain(name: NodeName, json: Json = False) -> None:
    """Grant no more GPUs of a node; running work continues."""
    with Client() as client:
        _print_node(client.drain_node(name), json)


def resume(name: NodeName, json: Json = False) -> None:
    """Put a node back into use; after a pause all its GPUs are read again."""
    with Client() as client:
        _print_node(client.resume_node(name), json)


def pause(
    name: NodeName,
    force: Annotated[bool, typer.Option("--force", help="Pause even if leases are active; they stay.")] = False,
    json: Json = False,
) -> int:
    """Drain a node and close NVML on it, for a GPU reset, a MIG change or a driver unload."""
    until_s = time.monotonic() + NVML_CLOSE_S
    with Client() as client:
        node = client.pause_node(name, force)
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


def forget(name: NodeName, json: Json = False) -> None:
    """Forget a node whose host is off: end its jobs and leases; jobs with a retry left start elsewhere."""
    with Client() as client:
        node = client.forget_node(name)
    if json:
        output.print_json(node)
    else:
        typer.echo(f"node {node.name} is forgotten, with {node.gpu_count} GPU{'' if node.gpu_count == 1 else 's'}")


def cordon(gpu: GpuName, json: Json = False) -> None:
    """Stop granting a GPU; its current holder keeps it."""
    with Client() as client:
        _print_gpu(client.cordon_gpu(_uuid(client, gpu)), json)


def uncordon(gpu: GpuName, json: Json = False) -> None:
    """Put a GPU back into use."""
    with Client() as client:
        _print_gpu(client.cordon_gpu(_uuid(client, gpu), cordoned=False), json)


def _uuid(client: Client, name: str) -> str:
    """The UUID of the GPU that `name` means. Raises NotFound, and InvalidRequest if several match."""
    gpus = client.gpus()
    prefix = name.lower().removeprefix("gpu-")
    matches = [gpu for gpu in gpus if name in (gpu.uuid, f"{gpu.node}:{gpu.index}")]
    if not matches and len({gpu.node for gpu in gpus}) == 1:
        matches = [gpu for gpu in gpus if name == str(gpu.index)]
    if not matches and len(prefix) >= MIN_UUID_DIGITS:
        matches = [gpu for gpu in gpus if gpu.uuid.lower().removeprefix("gpu-").startswith(prefix)]
    if len(matches) == 1:
        return matches[0].uuid
    if not matches:
        raise NotFound(
            f"There is no GPU {name}.",
            remedy="`gpulease status` shows nodes and indices, `gpulease status --json` UUIDs.",
        )
    several = ", ".join(f"{gpu.uuid} ({gpu.node}:{gpu.index})" for gpu in matches[:8])
    raise InvalidRequest(f"{name} matches several GPUs: {several}.", remedy="Give more of the UUID.")


def _print_node(node: Node, json: bool) -> None:
    if json:
        output.print_json(node)
    else:
        typer.echo(f"node {node.name} is {node.mode.value}{f' ({node.reason})' if node.reason else ''}")


def _print_gpu(gpu: Gpu, json: bool) -> None:
    if json:
        output.print_json(gpu)
    else:
        reason = f": {gpu.reason[:1].lower()}{gpu.reason[1:]}" if gpu.reason else ""
        typer.echo(f"GPU {gpu.index} of {gpu.node} is {gpu.state.value}{reason}")
