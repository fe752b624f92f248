"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpulease_cli.option_types import DEVICE_FORM, DURATION, Field, Number, OneOf
from gpulease_cli.parameters import option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import Mask, Priority, TopologyMode

Body = TypeVar("Body")
MAX_TOKEN = 2**63 - 1


def _lease_request() -> type[Any]:
    from gpulease_protocol.requests import LeaseRequest  # noqa: PLC0415 - for commands that ask for GPUs

    return LeaseRequest


def checked(make: Callable[[], Body]) -> Body:
    """The request body that `make` builds. Raises InvalidRequest, a usage error, for a field that is not allowed."""
    try:
        return make()
    except ValueError as error:
        raise InvalidRequest(f"{error}.", remedy="Correct this option and try again.") from error


def ttl(default: str, help: str) -> Callable[[Any], Any]:
    """The option `--ttl`."""
    kind = Field(DURATION, _lease_request, "ttl_s")
    return option("--ttl", type=kind, metavar="DURATION", default=default, show_default=default, help=help)


JSON = option("--json", is_flag=True, help="Print JSON.")
GPUS = option(
    "-n", "--gpus", type=Field(Number(), _lease_request, "count"), metavar="N", default=1, help="Number of GPUs."
)
NODES = option(
    "--nodes",
    type=Field(Number(), _lease_request, "nodes"),
    metavar="N",
    default=1,
    help="Number of nodes, each with -n GPUs; all are granted together or not at all.",
)
DEVICES = option(
    "--devices",
    type=DEVICE_FORM,
    metavar="LIST",
    help="Instead of -n: GPUs by index or UUID (0,2), a number of GPUs, -1 for all GPUs of a node, or auto.",
)
LABEL = option(
    "--label",
    type=Field(click.STRING, _lease_request, "label"),
    metavar="TEXT",
    default="",
    help="Shown to users who wait for these GPUs.",
)
WAIT = option(
    "--wait",
    type=DURATION,
    metavar="DURATION",
    default=0.0,
    show_default="do not wait",
    help="Maximum wait in the queue, such as 10m.",
)
FENCING_TOKEN = option(
    "--token",
    type=Number(int, 1, MAX_TOKEN),
    metavar="N",
    help="The lease's fencing token; by default from the environment, else from the daemon.",
)
MODEL = option(
    "--model",
    type=Field(click.STRING, _lease_request, "gpu_model"),
    metavar="TEXT",
    help="Only GPUs with TEXT in their name.",
)
TOPOLOGY = option(
    "--topology",
    type=OneOf(TopologyMode),
    default=TopologyMode.PREFERRED.value,
    show_default="preferred",
    help="required: wait for GPUs of one node that are all connected by NVLink. any: take the first free ones.",
)
PRIORITY = option(
    "--priority",
    type=OneOf(Priority),
    default=Priority.NORMAL.value,
    show_default="normal",
    help="interactive goes first: for few GPUs and a short time. scavenge takes what no one else wants.",
)
PREEMPTIBLE = option(
    "--preemptible",
    is_flag=True,
    help="Allow others that wait to end it, after a notice; it ends no one else's work. As with --priority scavenge.",
)
TIME = option(
    "--time",
    type=Field(DURATION, _lease_request, "time_s"),
    metavar="DURATION",
    show_default="no limit",
    help="End the lease after it has held its GPUs for this long, however often it is renewed.",
)
RECLAIM = option(
    "--reclaim-idle-after",
    type=Field(DURATION, _lease_request, "reclaim_idle_after_s"),
    metavar="DURATION",
    show_default="never",
    help="Take the GPUs back once none has worked for this long and others wait for them, after 5 minutes' notice.",
)
NODE = option(
    "--node",
    type=Field(click.STRING, _lease_request, "node"),
    metavar="NAME",
    help="Only GPUs of this node; any (the default): of any node.",
)
OWN_NODE = option(
    "--node",
    type=Field(click.STRING, _lease_request, "node"),
    metavar="NAME",
    show_default="that of this host",
    help="Only GPUs of this node; any: of any node.",
)
MASK = option(
    "--mask",
    type=OneOf(Mask),
    show_default="indices for deepspeed and vLLM, else uuids",
    help="How CUDA_VISIBLE_DEVICES names the GPUs; use indices for programs that accept only numbers.",
)
