"""`gpulease token`: bearer tokens, for callers whom the daemon cannot know by their connection."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.access import BearerToken, Role, TokenRequest
from gpulease.cli import output
from gpulease.cli.options import Json, checked, duration
from gpulease.client import Client
from gpulease.table import columns, plain
from gpulease.table import duration as spell

Expires = Annotated[
    float | None,
    typer.Option(
        parser=duration, metavar="DURATION", show_default="never", help="For how long it is good, such as 30d."
    ),
]


def create(
    user: Annotated[str, typer.Option(help="Whose it is to be; his leases and jobs are those of the login name.")],
    role: Annotated[Role, typer.Option(help="What it allows; `worker`: to report for a node.")] = Role.USER,
    expires: Expires = None,
    note: Annotated[str, typer.Option(help="What it is for; shown by `token list`.")] = "",
    json: Json = False,
) -> None:
    """Make a token and print it, this once. Only for administrators."""
    request = checked(lambda: TokenRequest(user=user, role=role, expires_s=expires, note=note))
    with Client() as client:
        made = client.create_token(request)
    if json:
        output.noun(made)
        return
    until = "until it is revoked" if made.expires_at is None else f"until {made.expires_at:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"token {made.id} of {made.user} ({made.role}) is good {until}; it is not shown again", err=True)
    if made.uid is None and made.role in (Role.USER, Role.ADMIN):
        typer.echo(f"this host does not know {made.user}, so no worker will run jobs submitted with it", err=True)
    typer.echo(made.bearer)


def list_tokens(json: Json = False) -> None:
    """List the tokens that were not revoked, without what makes them tokens."""
    with Client() as client:
        tokens = client.tokens()
    if json:
        output.nouns(tokens)
        return
    now = datetime.now(UTC)
    heads = ("TOKEN", "USER", "ROLE", "EXPIRES", "LAST USED", "MADE BY", "NOTE")
    output.text(columns(heads, [_row(token, now) for token in tokens]))


def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, as `token list` shows it.")],
    json: Json = False,
) -> None:
    """Revoke a token: it is refused from now on."""
    with Client() as client:
        revoked = client.revoke_token(token)
    if json:
        output.noun(revoked)
    else:
        typer.echo(f"token {revoked.id} of {revoked.user} is revoked")


def _row(token: BearerToken, now: datetime) -> tuple[str, ...]:
    left_s = None if token.expires_at is None else (token.expires_at - now).total_seconds()
    expires = "never" if left_s is None else "expired" if left_s <= 0 else f"in {spell(left_s)}"
    used = "-" if token.last_used_on is None else token.last_used_on.isoformat()
    return (
        token.id,
        token.user,
        token.role.value,
        expires,
        used,
        token.created_by or "-",
        plain(token.note, 60) or "-",
    )
