"""`gpulease node add`: another host may join, as one node, once, for a while."""

from __future__ import annotations

import shlex
import subprocess

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field
from gpulease_cli.options import checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol import endpoints
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import addresses
from gpulease_protocol.joining import join_token
from gpulease_protocol.status_table import format_duration
from gpulease_protocol.tokens import Role, TokenRequest

HOUR_S = 3600.0


@command(examples=("gpulease node add gpubox2", "gpulease node add root@gpubox2 --ssh"))
@argument("host", metavar="HOST", help="The host; its node gets this name. With --ssh as ssh takes it: USER@HOST.")
@option("--node", metavar="NAME", show_default="HOST", help="Name of the node.")
@option(
    "--expires",
    type=Field(DURATION, TokenRequest, "expires_s"),
    metavar="DURATION",
    default="1h",
    help="How long the host may take to join.",
)
@option(
    "--join-url",
    metavar="URL",
    show_default="where the daemon listens",
    help="Address at which the host reaches the daemon, if that is a proxy or another name.",
)
@option("--ssh", is_flag=True, help="Run the command there, by ssh.")
@option(
    "--program",
    metavar="WORDS",
    default="gpulease",
    help="How to call gpulease there, such as 'sudo /opt/gpulease/bin/gpulease'.",
)
def add(host: str, node: str | None, expires: float | None, join_url: str | None, ssh: bool, program: str) -> int:
    """Let another host join, and print the one command to run there. For administrators.

    The command has a token that is valid once, for this node, and for a while. It fetches the certificate of the
    daemon's authority, checks it, and leaves a token of its own for the worker.
    """
    if host.startswith("-"):
        raise InvalidRequest(f"HOST: {host!r} is no host.", remedy="Options come after the name of the host.")
    name = node or host.rpartition("@")[2]
    asked = checked(lambda: TokenRequest(user="root", role=Role.JOIN, node=name, expires_s=expires or HOUR_S))
    told = None if join_url is None else tuple(one.url for one in addresses.for_joining(join_url, "--join-url"))
    with Client() as client:
        authority = client.send(endpoints.authority())
        urls = told or authority.urls
        if not urls:
            output.print_error(
                "no other host can join",
                "the daemon listens on loopback alone, or does not know where others reach it",
                "gpulease serve --host ADDRESS --tls-auto; behind a proxy or a tunnel: --join-url URL",
            )
            return output.REFUSED
        made = client.create_token(asked)
        token = join_token(made.bearer, authority.fingerprint)
        words = [*shlex.split(program), "node", "join", ",".join(urls), "--node", name]
        if ssh and _runs_there(host, words, token):
            return output.DONE
        if ssh:
            client.revoke_token(made.id)
            output.print_error(
                f"{host} has not joined", "the command there failed, see above", "without --ssh it is printed"
            )
            return output.REFUSED
    lasts = format_duration(asked.expires_s or 0.0)
    click.echo(f"One host may join as node {name}, once, within {lasts}. Run there, as root:", err=True)
    if authority.fingerprint is None:
        click.echo(
            "The daemon has no authority of its own, so that host must trust its certificate: add --cacert FILE.",
            err=True,
        )
    click.echo(shlex.join([*words, token]))
    return output.DONE


def _runs_there(host: str, words: list[str], token: str) -> bool:
    """Run the command on the host; the token goes through a pipe, because command lines are visible to all users."""
    command = ["ssh", "-T", "--", host, shlex.join([*words, "-"])]
    try:
        return subprocess.run(command, input=token.encode(), check=False).returncode == 0
    except OSError as error:
        click.echo(f"ssh cannot be started: {error.strerror}", err=True)
        return False
