"""`gpulease acquire`, `renew` and `release`: leases without a command, for a shell."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from gpulease.agent_fields import agent_fields
from gpulease.client import Client
from gpulease.device_reuse import LEASE_VARIABLE
from gpulease.own_node import node_to_ask_for
from gpulease_cli import caller_mask, id_completion, names, output, owed, wait_progress
from gpulease_cli.calling_shell import CallingShell, calling_shell
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DeviceForm, Field, Number
from gpulease_cli.options import (
    DEVICES,
    FENCING_TOKEN,
    JSON,
    LABEL,
    MODEL,
    NODES,
    OWN_NODE,
    PREEMPTIBLE,
    PRIORITY,
    RECLAIM,
    TIME,
    TOPOLOGY,
    WAIT,
    checked,
    ttl,
)
from gpulease_cli.parameters import argument, option
from gpulease_cli.surrounding_lease import lease_token
from gpulease_protocol.errors import GpuleaseError, InUse, InvalidRequest, LeaseLost, NotFound, StaleToken
from gpulease_protocol.launchers import LEASE_VARIABLES, lease_variables
from gpulease_protocol.model import Lease, LeaseState, Liveness, Priority, TopologyMode
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_protocol.requests import LeaseRequest
from gpulease_protocol.status_table import format_duration

CLEAN = 'eval "$(gpulease release)"'
JOB = "job-"
"""Prefix of job ids."""


def _lease_ids(context: click.Context, parameter: click.Parameter, ids: tuple[str, ...]) -> tuple[str, ...]:
    job = next((text for text in ids if text.startswith(JOB)), None)
    if job is not None:
        raise click.BadParameter(f"{job} is a job; `gpulease cancel {job}` ends it and its lease")
    return ids


LEASES = argument(
    "leases",
    nargs=-1,
    metavar="[LEASE]...",
    help="Lease ids, or their beginnings; by default the lease of this shell.",
    callback=_lease_ids,
    shell_complete=id_completion.leases,
)


@command(
    examples=(
        'eval "$(gpulease acquire -n 1 --wait 10m)"',
        "gpulease acquire -n 1 --detach --ttl 8h --json",
        "gpulease acquire --nodes 2 -n 4 --wait 1h --json",
    )
)
@option(
    "-n",
    "--gpus",
    type=Field(Number(), LeaseRequest, "count"),
    metavar="N",
    show_default="1",
    help="Number of GPUs.",
)
@DEVICES
@NODES
@option("--detach", is_flag=True, help="End the lease after its --ttl, not with this shell.")
@ttl("2h", "With --detach: lifetime of the lease unless it is renewed, such as 30m.")
@WAIT
@LABEL
@MODEL
@TOPOLOGY
@OWN_NODE
@PRIORITY
@PREEMPTIBLE
@TIME
@RECLAIM
@option("--new", is_flag=True, help="Lease other GPUs, even if this shell has a lease, which it keeps.")
@JSON
def acquire(
    gpus: int | None,
    devices: DeviceForm | None,
    nodes: int,
    detach: bool,
    ttl: float,
    wait: float,
    label: str,
    model: str | None,
    topology: TopologyMode,
    node: str | None,
    priority: Priority,
    preemptible: bool,
    time: float | None,
    reclaim_idle_after: float | None,
    new: bool,
    json: bool,
) -> None:
    """Bind this shell to leased GPUs until it ends or `gpulease release`.

    The output is for a shell: eval "$(gpulease acquire -n 1)" binds the shell to the GPUs, or fails with the exit code
    of this command. With --nodes, it binds the shell to the GPUs of the first node; --json shows the environment of
    each node.
    """
    if gpus is not None and devices is not None:
        raise InvalidRequest("Give -n or --devices, not both.")
    caller = calling_shell()
    connected = wait_progress.patient_client(wait)
    with (
        wait_progress.ended_by_signals(),
        connected as client,
        owed.settled_later(client),
        wait_progress.QueueProgress(client) as progress,
    ):
        if not new:
            _check_unbound(client)
        owner = caller.process.owner_fields(local=client.destination.local) if caller and not detach else {}
        if nodes == 1:
            node = node_to_ask_for(client, node, must_be_here=False)
        among = caller_mask.among(client, gpus or 1, devices, node, quiet=False) if nodes == 1 else None
        which: dict[str, Any] = {"count": gpus or 1} if devices is None else {"devices": devices}
        asked: dict[str, Any] = which | {"among": among, "ttl_s": ttl, "label": label, "gpu_model": model}
        asked |= {"node": node, "nodes": nodes, "topology": topology.value, "priority": priority.value, "time_s": time}
        asked |= {"preemptible": preemptible or None, "reclaim_idle_after_s": reclaim_idle_after}
        request = checked(
            lambda: LeaseRequest(**asked, **agent_fields(), **owner, watch_owner=bool(owner), queue=wait > 0)
        )
        lease = client.request_lease(request, wait, progress.start)
        try:
            progress.close()
            _print_acquired(lease, caller, json)
        except BaseException:  # no one would know of it
            client.release(lease.id, lease.fencing_token)
            raise


def _print_acquired(lease: Lease, caller: CallingShell | None, json: bool) -> None:
    """What the shell evaluates, or the lease as JSON. Raises OSError unless all of it was written."""
    if json:
        output.print_json(lease)
    else:
        _say(_describe(lease, caller))
        if sys.stdout.isatty():
            _say('to bind this shell to them, enter the lines below; or next time: eval "$(gpulease acquire ...)"')
        fish = caller is not None and caller.is_fish
        for name, value in lease_variables(lease.env, os.environ).items():
            click.echo(f"set -gx {name} {shlex.quote(value)};" if fish else f"export {name}={shlex.quote(value)}")
    sys.stdout.flush()


def _check_unbound(client: Client) -> None:
    """Raise InUse if this shell is bound to an active lease, which the variables of another would hide."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    try:
        lease = client.lease_by_id(lease_id) if lease_id else None
    except NotFound:
        return
    if lease is not None and lease.state is LeaseState.ACTIVE:
        raise InUse(
            f"This shell has {lease.id} already: {_gpus(lease)}.",
            remedy=f"Give it back first: {CLEAN}. Or keep both: gpulease acquire --new.",
        )


def _describe(lease: Lease, caller: CallingShell | None) -> str:
    """What was leased, and how it ends."""
    if lease.liveness is Liveness.PROCESS and caller is not None:
        ends = f"until {caller.name} (pid {caller.process.pid}) ends{_at_most(lease)}"
    else:
        ends = f"for {format_duration(_lasts_s(lease))}"
        if _lasts_s(lease) == lease.ttl_s:
            ends += f" unless renewed{_at_most(lease)}"
    return f"{_gpus(lease)} ({lease.id}), {ends}; `gpulease release {lease.id}` gives it back"


def _lasts_s(lease: Lease) -> float:
    """How long it lasts from now on if it is not renewed; less than its ttl if its declared time ends before."""
    return lease.ttl_s if lease.ends_in_s is None else min(lease.ttl_s, math.ceil(lease.ends_in_s))


def _at_most(lease: Lease) -> str:
    """How long it lasts however often it is renewed, if that has an end."""
    return "" if lease.ends_in_s is None else f", for {format_duration(math.ceil(lease.ends_in_s))} at most"


def _gpus(lease: Lease) -> str:
    nodes = dict.fromkeys(gpu.node for gpu in lease.gpus)
    return "; ".join(gpu_ranges([gpu.index for gpu in lease.gpus if gpu.node == node], node) for node in nodes)


@command(examples=("gpulease renew", "gpulease renew lease-6434526eb94cfb23"))
@LEASES
@FENCING_TOKEN
@JSON
def renew(leases: tuple[str, ...], token: int | None, json: bool) -> int:
    """Extend leases by their full ttl from now."""
    return _each(leases, token, json, lambda client, lease, proof: client.renew(lease, proof), _print_renewed)


@command(examples=('eval "$(gpulease release)"', "gpulease release lease-6434526eb94cfb23"))
@LEASES
@FENCING_TOKEN
@JSON
def release(leases: tuple[str, ...], token: int | None, json: bool) -> int:
    """End leases and free their GPUs; queued requests are withdrawn. Administrators may end any user's lease.

    eval "$(gpulease release)" also removes the variables of the lease from this shell.
    """
    return _each(leases, token, json, _release, _print_released)


def _each(
    ids: tuple[str, ...],
    token: int | None,
    json: bool,
    act: Callable[[Client, str, int | None], Lease],
    show: Callable[[Lease], None],
) -> int:
    """Act on each lease, by default that of this shell, whatever became of earlier ones. Raises the first error."""
    refused: list[GpuleaseError] = []
    own = os.environ.get(LEASE_VARIABLE)
    if not ids and not own:
        raise click.UsageError("This shell has no lease. Name one: `gpulease leases` lists them.")
    with Client() as client:
        for word in ids or (str(own),):
            try:
                lease_id = _lease_id(client, word)
                lease = act(client, lease_id, lease_token(client, lease_id, token))
            except InvalidRequest:
                raise
            except GpuleaseError as error:
                if refused:
                    output.print_gpulease_error(error)
                refused.append(error)
                continue
            if json:
                output.print_json(lease)
            else:
                show(lease)
    if refused:
        raise refused[0]
    return output.DONE


def _lease_id(client: Client, word: str) -> str:
    """The id of the lease with this id or beginning of one."""
    match = names.find(client, word, ("lease",))
    if match.kind != "lease":
        raise NotFound(f"{match} is not a lease.", remedy=f"`gpulease cancel {match.id}` ends it and its lease.")
    return match.id


def _print_renewed(lease: Lease) -> None:
    if lease.liveness is Liveness.PROCESS:
        click.echo(f"{lease.id} lasts until pid {lease.holder.owner_pid} ends{_at_most(lease)}")
    else:
        click.echo(f"{lease.id} lasts {format_duration(_lasts_s(lease))} from now")


def _release(client: Client, lease_id: str, token: int | None) -> Lease:
    """End a lease. That of this shell may have ended before: it is cleaned all the same."""
    try:
        return client.release(lease_id, token)
    except (LeaseLost, NotFound, StaleToken):
        lease = client.lease_by_id(lease_id)
        if lease_id != os.environ.get(LEASE_VARIABLE) or lease.state is not LeaseState.ENDED:
            raise
        return lease


def _print_released(lease: Lease) -> None:
    """For `eval` in the shell that had the lease: commands that remove its variables."""
    ended = f"{lease.id} is {lease.end_reason or lease.state}"
    if lease.id != os.environ.get(LEASE_VARIABLE):
        click.echo(ended)
        return
    _say(ended)
    variables = _bound_variables(os.environ)
    if sys.stdout.isatty():
        _say(f"this shell still has {', '.join(variables)}; remove them: unset {' '.join(variables)}")
        return
    caller = calling_shell()
    fish = caller is not None and caller.is_fish
    click.echo("\n".join(f"set -e {name};" for name in variables) if fish else f"unset {' '.join(variables)}")


def _bound_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables that a lease has set here."""
    return sorted(name for name in environ if LEASE_VARIABLES.fullmatch(name))


def _say(text: str) -> None:
    click.echo(f"gpulease: {text}", err=True)
