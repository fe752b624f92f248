"""`gpulease setup`: makes this host ready for all its users, and takes that back."""

from __future__ import annotations

import os
import sys

import click

from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.parameters import option
from gpulease_cli.sample_config import sample
from gpulease_protocol.errors import InvalidRequest


@command(examples=("gpulease setup --dry-run", "gpulease setup --admin @sudo", "gpulease setup --uninstall"))
@option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@option("--yes", is_flag=True, help="Do it without asking.")
@option(
    "--admin",
    "admins",
    multiple=True,
    metavar="USER|@GROUP",
    show_default="@sudo or @wheel, if this host has such a group",
    help="Administrator, written into a new configuration file. Repeatable.",
)
@option("--uninstall", is_flag=True, help="Remove the program and its units; settings, records and logs stay.")
@option("--purge", is_flag=True, help="With --uninstall: remove these too.")
@click.pass_context
def setup(
    context: click.Context, dry_run: bool, yes: bool, admins: tuple[str, ...], uninstall: bool, purge: bool
) -> int:
    """Set up this host for all its users: systemd units, a link to the program, a configuration file.

    Shows what it will do, then asks. Run it again after an upgrade; what is as it should be is left alone.
    """
    with needs_extra("server"):
        from gpulease_server import host_setup  # noqa: PLC0415 - an extra
    if purge and not uninstall:
        raise click.UsageError("--purge goes with --uninstall")
    host = host_setup.examine()
    if uninstall:
        plan = host_setup.removal(host, purge=purge)
    else:
        config = _config(context, admins or host_setup.usual_admins())
        plan = host_setup.planned(host, config, host_setup.unit_files())
    for step in plan.steps:
        click.echo(f"  {step}")
    if not plan.steps:
        click.echo(plan.without_steps)
    elif not dry_run and not _agreed(yes):
        return output.REFUSED
    elif not dry_run:
        for step in host_setup.apply(plan):
            click.echo(f"done: {step}")
    if admins and host.config:
        click.echo("--admin changed nothing: there is a configuration file, with `admins` in [serve].")
    for note in plan.notes:
        click.echo(note)
    return output.DONE


def _config(context: click.Context, admins: tuple[str, ...]) -> str:
    """The configuration file to begin with."""
    from gpulease_server.setting_checks import checked_admins  # noqa: PLC0415 - `serve` imports it too

    try:
        chosen = {"admins": checked_admins(list(admins))} if admins else {}
    except ValueError as error:
        raise click.UsageError(f"--admin: {error}") from error
    return sample(context.find_root().command, {"serve": chosen})


def _agreed(yes: bool) -> bool:
    """True if the steps shown may be done. Raises `InvalidRequest` where no one can be asked."""
    if os.geteuid() != 0:
        raise InvalidRequest("Only root can do this.", remedy="Run it with sudo, or look at it with --dry-run.")
    if not yes and not sys.stdin.isatty():
        raise InvalidRequest("There is no terminal to ask on.", remedy="Add --yes.")
    return yes or click.confirm("Go on?")
