"""`gpulease token`: bearer tokens, for callers that the daemon cannot identify by their connection."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.options import Json, checked, duration
from gpulease_protocol.status_table import align_columns, format_duration, printable
from gpulease_protocol.tokens import BearerToken, Role, TokenRequest

Expires = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="DURATION", show_default="never", help="Lifetime of the token, such as 30d."),
]


def create(
    user: Annotated[
        str,
        typer.Option(
            metavar="USER", help="Login name that the token stands for: its leases and jobs belong to this user."
        ),
    ],
    role: Annotated[
        Role, typer.Option(help="What the token allows; `worker` allows reporting for a node.")
    ] = Role.USER,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="the first that it reports for",
            help="With `--role worker`: the only node that the token may report for.",
        ),
    ] = None,
    expires: Expires = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Purpose of the token; shown by `token list`.")] = "",
    json: Json = False,
) -> None:
    """Create a token and print it; it cannot be shown again. For administrators."""
    request = checked(lambda: TokenRequest(user=user, role=role, node=node, expires_s=expires, note=note))
    with Client() as client:
        made = client.create_token(request)
    if json:
        output.print_json(made)
        return
    until = "until revoked" if made.expires_at is None else f"until {made.expires_at:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"{made.id} of {made.user} ({made.role}) is valid {until}; it is not shown again", err=True)
    if made.uid is None and made.role is not Role.WORKER:
        typer.echo(_unknown_user(made), err=True)
    typer.echo(made.bearer)


def list_tokens(json: Json = False) -> None:
    """List the tokens that have not been revoked, without their secrets."""
    with Client() as client:
        tokens = client.tokens()
    if json:
        output.print_json_list(tokens)
        return
    now = datetime.now(UTC)
    heads = ("TOKEN", "USER", "ROLE", "NODE", "EXPIRES", "LAST USED", "MADE BY", "NOTE")
    output.print_table(align_columns(heads, [_row(token, now) for token in tokens]))


def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Token id, as `token list` shows it.")],
    json: Json = False,
) -> None:
    """Revoke a token; it is refused from now on."""
    with Client() as client:
        revoked = client.revoke_token(token)
    if json:
        output.print_json(revoked)
    else:
        typer.echo(f"{revoked.id} of {revoked.user} is revoked")


def _unknown_user(made: BearerToken) -> str:
    """What it means that the daemon's host does not have the user of a token."""
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
        printable(token.note, 60) or "-",
    )
