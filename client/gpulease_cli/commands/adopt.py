"""`gpulease adopt`: a lease for a process that was started without one."""

from __future__ import annotations

import click

from gpulease.agent_fields import agent_fields
from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import Number
from gpulease_cli.options import JSON, LABEL
from gpulease_cli.parameters import argument
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_protocol.requests import LeaseRequest

MAX_PID = 2**31 - 1


@command(examples=("gpulease adopt 4242", 'gpulease adopt --label "started by hand" 4242'))
@argument(
    "owner_pid",
    type=Number(int, 1, MAX_PID),
    metavar="PID",
    help="A process on this host; of several, the one that started the others.",
)
@LABEL
@JSON
def adopt(owner_pid: int, label: str, json: bool) -> None:
    """Lease the GPUs that a running process of yours uses already, until it ends.

    All GPUs of the process and of those below it, and only if no other process is on them: name torchrun, not a rank.
    """
    process, status = ProcessId.of(owner_pid), stat(owner_pid)
    if process is None or status is None:
        raise InvalidRequest(f"owner_pid: there is no process {owner_pid} on this host.", remedy="Check it with ps.")
    with Client() as client:
        owner = process.owner_fields(local=client.destination.local)
        if not owner:
            why = "owner_pid: /proc here does not show this shell's own processes."
            raise InvalidRequest(why, remedy="Ask outside the container.")
        lease = client.request_lease(LeaseRequest(adopt=True, label=label, **agent_fields(), **owner))
    if json:
        output.print_json(lease)
        return
    gpus = gpu_ranges([gpu.index for gpu in lease.gpus], ", ".join(sorted({gpu.node for gpu in lease.gpus})))
    click.echo(f"{gpus} ({lease.id}), until {status.name} (pid {owner_pid}) ends")
