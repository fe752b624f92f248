"""The program: every command under its name."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Annotated

import typer

from gpulease import config_file
from gpulease.cli import (
    administration,
    config,
    database,
    doctor,
    events,
    jobs,
    leases,
    metrics,
    run,
    serve,
    settings,
    status,
    tokens,
)
from gpulease.cli.groups import HELP, BySubject

app = typer.Typer(
    cls=BySubject,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": list(HELP)},
    epilog="Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no daemon answers, 4 the lease was lost; run, wait and "
    "submit --follow pass on the command's own. GPULEASE_URL says where the daemon is. More in docs/cli.md.",
)
databases = typer.Typer(cls=BySubject, help="The daemon's database.", no_args_is_help=True, rich_markup_mode=None)

nodes = typer.Typer(cls=BySubject, help="The nodes, in and out of use.", no_args_is_help=True, rich_markup_mode=None)
configuration = typer.Typer(
    cls=BySubject, help="The settings, and where each comes from.", no_args_is_help=True, rich_markup_mode=None
)
bearer_tokens = typer.Typer(
    cls=BySubject, help="Tokens for callers elsewhere.", no_args_is_help=True, rich_markup_mode=None
)
gpus = typer.Typer(cls=BySubject, help="Single GPUs, in and out of use.", no_args_is_help=True, rich_markup_mode=None)

# What follows a command's first word belongs to that word's own program, options included.
PASS_ON = {"allow_interspersed_args": False}
WITH_FILES = {"serve", "worker", "doctor", "db"}
"""Commands whose options configuration files may give. What they say under `[client]` the library reads by itself."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpulease {metadata.version('gpulease')}")
        raise typer.Exit


@app.callback()
def program(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="GPULEASE_URL",
            help="Where the daemon is: http://host:port or unix:///path, several with commas.",
            show_default="the local socket, else http://127.0.0.1:8750",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="GPULEASE_TOKEN",
            help="Bearer token. Others see an option's value; the variable's, or that of a file, they do not.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="GPULEASE_CONFIG",
            help="The configuration file.",
            show_default="/etc/gpulease/config.toml, and ~/.config/gpulease/config.toml over it",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Leases of GPUs on shared machines.

    gpulease status shows the GPUs; gpulease run -n 2 -- python train.py leases two of them and runs a command there.
    """
    # Where clients look, and what `run` starts, too.
    given = {"GPULEASE_URL": url, "GPULEASE_TOKEN": token, config_file.VARIABLE: config and os.path.abspath(config)}
    os.environ.update({name: value for name, value in given.items() if value})
    if context.invoked_subcommand in WITH_FILES:
        sections = config_file.load()
        settings.check(context.command, sections)
        context.default_map = settings.defaults(context.command, sections)


for command in (serve.serve, serve.worker, status.status, doctor.doctor):
    app.command()(command)
app.command(context_settings=PASS_ON)(run.run)
app.command(context_settings=PASS_ON)(jobs.submit)
app.command("jobs")(jobs.list_jobs)
for job_command in (jobs.logs, jobs.cancel, jobs.wait, metrics.metrics):
    app.command()(job_command)
for lease_command in (leases.acquire, leases.renew, leases.release, leases.explain):
    app.command()(lease_command)
app.command("leases")(leases.list_leases)
app.command("events")(events.list_events)
for database_command in (database.upgrade, database.current, database.check, database.backup):
    databases.command()(database_command)
app.add_typer(databases, name="db")
configuration.command("show", context_settings=PASS_ON)(config.show)
configuration.command("check")(config.check)
app.add_typer(configuration, name="config")
nodes.command("list")(administration.list_nodes)
for node_command in (administration.drain, administration.resume, administration.pause):
    nodes.command()(node_command)
app.add_typer(nodes, name="node")
for gpu_command in (administration.cordon, administration.uncordon):
    gpus.command()(gpu_command)
app.add_typer(gpus, name="gpu")
for token_command in (tokens.create, tokens.revoke):
    bearer_tokens.command()(token_command)
bearer_tokens.command("list")(tokens.list_tokens)
app.add_typer(bearer_tokens, name="token")
