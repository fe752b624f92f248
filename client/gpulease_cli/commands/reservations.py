"""`gpulease reservations`: GPUs that are kept for someone in a window of time."""

from __future__ import annotations

from datetime import datetime

import click

from gpulease.client import Client
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import END_OF_PERIOD, MOMENT_AHEAD, Field, Number
from gpulease_cli.options import JSON, checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_protocol.reservations import Reservation, ReservationRequest
from gpulease_protocol.status_table import align_columns, printable, short_id

HEADS = ("RESERVATION", "FOR", "FROM", "TO", "GPUS", "REASON")


@command(
    examples=(
        "gpulease reservations add --node n1 --gpus 4 --from 2026-12-03T08:00 --to 2026-12-03T18:00 --user ada",
        "gpulease reservations add --gpu GPU-... --from 2h --to 6h --group vision --reason 'course'",
    )
)
@option("--node", metavar="NAME", help="The node that has them.")
@option(
    "-n",
    "--gpus",
    "count",
    type=Field(Number(), ReservationRequest, "count"),
    metavar="N",
    help="How many GPUs of the node; the daemon chooses them.",
)
@option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="A GPU to keep: INDEX, NODE:INDEX or UUID. Repeatable.",
    shell_complete=id_completion.gpus,
)
@option(
    "--from",
    "from_at",
    type=MOMENT_AHEAD,
    required=True,
    help="When it begins: 08:00, 2026-12-03T08:00, or 2h from now.",
)
@option(
    "--to",
    "to_text",
    type=END_OF_PERIOD,
    required=True,
    help="When it ends, in the same forms; a time of day is the first one after --from.",
)
@option("--user", metavar="USER", help="The user it is for.")
@option("--group", metavar="GROUP", help="The group of `gpulease limits` it is for.")
@option("--reason", metavar="TEXT", help="Purpose. Users who have to wait see it.")
@JSON
def add(
    node: str | None,
    count: int | None,
    gpus: tuple[str, ...],
    from_at: datetime,
    to_text: str,
    user: str | None,
    group: str | None,
    reason: str | None,
    json: bool,
) -> None:
    """Keep GPUs for a user or a group in a window of time. For administrators.

    Others get these GPUs only for leases that end before the window. It is refused if another reservation, or a lease
    that may last into the window, is in the way.
    """
    if (node is not None, count is not None, bool(gpus)) not in ((True, True, False), (False, False, True)):
        remedy = "Give --node NAME and --gpus N, or --gpu GPU, repeated."
        raise InvalidRequest("It is not said which GPUs.", remedy=remedy)
    to_at = END_OF_PERIOD.after(to_text, from_at)
    if to_at <= from_at:
        raise InvalidRequest("--to is not after --from.", remedy="Correct one of them and try again.")
    with Client() as client:
        uuids = [names.find_gpu(client, one).uuid for one in gpus]
        request = checked(
            lambda: ReservationRequest(
                node=node,
                count=count,
                gpus=uuids,
                from_at=from_at,
                to_at=to_at,
                user=user,
                group=None if group is None else group.removeprefix("@"),
                reason=reason,
            )
        )
        made = client.create_reservation(request)
    if json:
        output.print_json(made)
    else:
        output.print_table(align_columns(HEADS, [_row(made)]))


@command("list", examples=("gpulease reservations list",))
@JSON
def list_reservations(json: bool) -> None:
    """List the reservations that have not ended. The first to begin comes first."""
    with Client() as client:
        found = client.reservations()
    if json:
        output.print_json_list(found)
    else:
        on_terminal = output.terminal_width() is not None
        rows = [(short_id(one.id) if on_terminal else one.id, *_row(one)[1:]) for one in found]
        cut = {"FOR": 8, "GPUS": 8, "REASON": 8}
        output.print_rows(HEADS, rows, cut=cut, drop=("REASON", "GPUS"), none="No reservations.")


@command(examples=("gpulease reservations cancel reservation-9f86d081884c7d65",))
@argument("reservation_id", metavar="RESERVATION", help="Its id, or the beginning of it.")
@JSON
def cancel(reservation_id: str, json: bool) -> None:
    """Take a reservation back; it ends no lease. For administrators."""
    with Client() as client:
        alike = [one.id for one in client.reservations() if one.id.startswith(reservation_id)]
        gone = client.cancel_reservation(alike[0] if len(alike) == 1 else reservation_id)
    if json:
        output.print_json(gone)
    else:
        click.echo(f"cancelled {gone.id}")


def _row(one: Reservation) -> tuple[str, ...]:
    by_node: dict[str, list[int]] = {}
    for device in one.gpus:
        by_node.setdefault(device.node, []).append(device.index)
    return (
        one.id,
        f"@{one.group}" if one.group is not None else one.user or "-",
        f"{one.from_at.astimezone():%Y-%m-%d %H:%M}",
        f"{one.to_at.astimezone():%Y-%m-%d %H:%M}",
        "; ".join(gpu_ranges(indices, node) for node, indices in by_node.items()),
        printable(one.reason or "-", 60),
    )
