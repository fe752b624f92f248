"""`gpulease node` and `gpulease gpu`: taking out of use, and putting back."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpulease.cli import output
from gpulease.cli.options import Json
from gpulease.client import Client
from gpulease.errors import InvalidRequest, NotFound
from gpulease.exchange import PAUSED
from gpulease.model import Gpu, Node, NodeMode
from gpulease.table import columns

CLOSES_WITHIN_S = 10.0
"""How long `pause` waits for the worker to say that NVML is closed."""
LOOK_S = 0.1
LEAST_OF_UUID = 4
"""How much of a UUID says which GPU is meant: an index that is not there must not be taken for the beginning of one."""

NodeName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")]
GpuName = Annotated[
    str, typer.Argument(metavar="GPU", help="UUID of the GPU, the beginning of one, or NODE:INDEX; INDEX on one node.")
]


def list_nodes(json: Json = False) -> None:
    """List the nodes, and whether each is in use."""
    with Client() as client:
        nodes = client.nodes()
    if json:
        output.nouns(nodes)
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
    output.text(columns(heads, rows))


def drain(name: NodeName, json: Json = False) -> None:
    """Grant nothing of a node any more; what runs there goes on."""
    with Client() as client:
        _say(client.drain_node(name), json)


def resume(name: NodeName, json: Json = False) -> None:
    """Put a node back into use; after a pause everything is read anew."""
    with Client() as client:
        _say(client.resume_node(name), json)


def pause(
    name: NodeName,
    force: Annotated[bool, typer.Option("--force", help="Although leases are active there; they stay.")] = False,
    json: Json = False,
) -> int:
    """Drain a node and close NVML on it, for a GPU reset, a MIG change or a driver unload."""
    until_s = time.monotonic() + CLOSES_WITHIN_S
    with Client() as client:
        node = client.pause_node(name, force)
        while node.mode is NodeMode.PAUSED and node.reason != PAUSED and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            node = client.node(name)
    _say(node, json)
    if node.reason == PAUSED:
        return output.DONE
    output.complain(
        "NVML may still be open",
        f"the worker of {name} has not said within {CLOSES_WITHIN_S:g} s that it has closed it",
        "Look whether that worker runs; gpulease node list says so once it has.",
    )
    return output.REFUSED


def cordon(gpu: GpuName, json: Json = False) -> None:
    """Grant a GPU to nobody any more; who holds it keeps it."""
    with Client() as client:
        _say_gpu(client.cordon_gpu(_uuid(client, gpu)), json)


def uncordon(gpu: GpuName, json: Json = False) -> None:
    """Put a GPU back into use."""
    with Client() as client:
        _say_gpu(client.cordon_gpu(_uuid(client, gpu), cordoned=False), json)


def _uuid(client: Client, name: str) -> str:
    """The UUID of the one GPU that is meant. Raises NotFound, and InvalidRequest when there are several."""
    gpus = client.gpus()
    wanted = name.lower().removeprefix("gpu-")
    found = [gpu for gpu in gpus if name in (gpu.uuid, f"{gpu.node}:{gpu.index}")]
    if not found and len({gpu.node for gpu in gpus}) == 1:
        found = [gpu for gpu in gpus if name == str(gpu.index)]
    if not found and len(wanted) >= LEAST_OF_UUID:
        found = [gpu for gpu in gpus if gpu.uuid.lower().removeprefix("gpu-").startswith(wanted)]
    if len(found) == 1:
        return found[0].uuid
    if not found:
        raise NotFound(f"There is no GPU {name}.", remedy="gpulease status shows nodes and indices, --json the UUIDs.")
    several = ", ".join(f"{gpu.uuid} ({gpu.node}:{gpu.index})" for gpu in found[:8])
    raise InvalidRequest(f"{name} may be any of {several}.", remedy="Give more of the UUID.")


def _say(node: Node, json: bool) -> None:
    if json:
        output.noun(node)
    else:
        typer.echo(f"node {node.name} is {node.mode.value}{f' ({node.reason})' if node.reason else ''}")


def _say_gpu(gpu: Gpu, json: bool) -> None:
    if json:
        output.noun(gpu)
    else:
        typer.echo(f"GPU {gpu.index} of {gpu.node} is {gpu.state.value}{f': it {gpu.reason}' if gpu.reason else ''}")
