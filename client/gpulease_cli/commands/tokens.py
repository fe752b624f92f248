"""`gpulease token`: bearer tokens, for callers that the daemon cannot identify by their connection."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field, OneOf
from gpulease_cli.options import JSON, checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol.budgets import Budget
from gpulease_protocol.gpu_hours import plain_hours
from gpulease_protocol.status_table import format_duration, printable
from gpulease_protocol.tokens import MADE_ROLES, BearerToken, Role, TokenRequest


@command(
    examples=(
        "gpulease token create --user ada --role viewer --expires 30d",
        "gpulease token create --user ada --max-gpus 2 --max-lease-time 4h --gpu-hours-per-day 16 --expires 7d",
    )
)
@option(
    "--user",
    required=True,
    type=Field(click.STRING, TokenRequest, "user"),
    metavar="USER",
    help="Login name that the token stands for: its leases and jobs belong to this user.",
)
@option(
    "--role",
    type=OneOf(MADE_ROLES),
    default=Role.USER.value,
    help="What the token allows; `worker` allows reporting for a node.",
)
@option(
    "--node",
    type=Field(click.STRING, TokenRequest, "node"),
    metavar="NAME",
    show_default="the first that it reports for",
    help="With `--role worker`: the only node that the token may report for.",
)
@option(
    "--expires",
    type=Field(DURATION, TokenRequest, "expires_s"),
    metavar="DURATION",
    show_default="never",
    help="Lifetime of the token, such as 30d.",
)
@option(
    "--note",
    type=Field(click.STRING, TokenRequest, "note"),
    metavar="TEXT",
    default="",
    help="Purpose of the token; shown by `token list`.",
)
@option(
    "--max-gpus",
    type=Field(click.INT, TokenRequest, "max_gpus"),
    metavar="N",
    show_default="no limit",
    help="GPUs that may be held with the token at a time.",
)
@option(
    "--max-lease-time",
    type=Field(DURATION, TokenRequest, "max_lease_s"),
    metavar="DURATION",
    show_default="no limit",
    help="How long a lease or job of the token may hold GPUs, such as 4h, however often it is renewed.",
)
@option(
    "--gpu-hours-per-day",
    type=Field(click.FLOAT, TokenRequest, "gpu_hours_per_day"),
    metavar="HOURS",
    show_default="no limit",
    help="GPU-hours that may be held with the token in one day, from 00:00 UTC.",
)
@JSON
def create(
    user: str,
    role: Role,
    node: str | None,
    expires: float | None,
    note: str,
    max_gpus: int | None,
    max_lease_time: float | None,
    gpu_hours_per_day: float | None,
    json: bool,
) -> None:
    """Create a token and print it; it cannot be shown again. For administrators."""
    request = checked(
        lambda: TokenRequest(
            user=user,
            role=role,
            node=node,
            expires_s=expires,
            note=note,
            max_gpus=max_gpus,
            max_lease_s=max_lease_time,
            gpu_hours_per_day=gpu_hours_per_day,
        )
    )
    with Client() as client:
        made = client.create_token(request)
    if json:
        output.print_json(made)
        return
    until = "until revoked" if made.expires_at is None else f"until {made.expires_at:%Y-%m-%d %H:%M} UTC"
    click.echo(f"{made.id} of {made.user} ({made.role}) is valid {until}; it is not shown again", err=True)
    if made.budget is not None:
        click.echo(f"What may be held with it: {describe_budget(made.budget)}.", err=True)
    if made.expires_at is None:
        click.echo("Anyone who finds it can use it until it is revoked; --expires 30d would limit that.", err=True)
    if made.uid is None and made.role is not Role.WORKER:
        click.echo(_unknown_user(made), err=True)
    click.echo(made.bearer)


@command("list", examples=("gpulease token list",))
@JSON
def list_tokens(json: bool) -> None:
    """List the tokens that have not been revoked, without their secrets."""
    with Client() as client:
        tokens = client.tokens()
    if json:
        output.print_json_list(tokens)
        return
    now = datetime.now(UTC)
    heads = ("TOKEN", "USER", "ROLE", "NODE", "EXPIRES", "LAST USED", "MADE BY", "BUDGET", "NOTE")
    cut = {"USER": 8, "NODE": 8, "BUDGET": 12, "NOTE": 12}
    rows, none = [_row(token, now) for token in tokens], "No tokens. `gpulease token create --user USER` makes one."
    output.print_rows(heads, rows, cut=cut, drop=("MADE BY", "NODE", "BUDGET"), none=none)


@command(examples=("gpulease token revoke token-6434526eb94cfb23",))
@argument("token_id", metavar="ID", help="Token id, as `token list` shows it.")
@JSON
def revoke(token_id: str, json: bool) -> None:
    """Revoke a token; it is refused from now on."""
    with Client() as client:
        revoked = client.revoke_token(token_id)
    if json:
        output.print_json(revoked)
    else:
        click.echo(f"{revoked.id} of {revoked.user} is revoked")


def describe_budget(budget: Budget) -> str:
    """A budget in few words: `2 GPUs, 4 h a lease, 16 GPU-hours a day`."""
    words = []
    if budget.max_gpus is not None:
        words.append(f"{budget.max_gpus} GPU{'' if budget.max_gpus == 1 else 's'}")
    if budget.max_lease_s is not None:
        words.append(f"{format_duration(budget.max_lease_s)} a lease")
    if budget.gpu_hours_per_day is not None:
        words.append(f"{plain_hours(budget.gpu_hours_per_day)} GPU-hours a day")
    return ", ".join(words)


def _unknown_user(made: BearerToken) -> str:
    """The warning about a token for a user who does not exist on the daemon's host."""
    jobs = "; until then no worker runs jobs submitted with it" if made.role is not Role.VIEWER else ""
    return (
        f"the daemon's host has no user {made.user}: as soon as it has one, who may be another person, this token is"
        f" revoked{jobs}"
    )


def _row(token: BearerToken, now: datetime) -> tuple[str, ...]:
    left_s = None if token.expires_at is None else (token.expires_at - now).total_seconds()
    expires = "never" if left_s is None else "expired" if left_s <= 0 else f"in {format_duration(left_s)}"
    used = "-" if token.last_used_on is None else token.last_used_on.isoformat()
    return (
        token.id,
        token.user,
        token.role.value,
        printable(token.node or "-", 60),
        expires,
        used,
        token.created_by or "-",
        "-" if token.budget is None else describe_budget(token.budget),
        printable(token.note, 60) or "-",
    )
