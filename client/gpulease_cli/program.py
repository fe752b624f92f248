"""The program: its own commands under their names, and those that other packages bring."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpulease_cli import settings
from gpulease_cli.commands import (
    acquire,
    config,
    events,
    jobs,
    leases,
    maintenance,
    metrics,
    run,
    status,
    submit,
    tokens,
)
from gpulease_cli.help_format import HELP_OPTIONS, SUBJECTS, Command, CommandsBySubject, group
from gpulease_cli.installed_commands import Commands
from gpulease_protocol.host import config_file
from gpulease_protocol.host.server_owner import DAEMON_USER_VARIABLE


class Program(CommandsBySubject):
    """The program's group of commands, with those that installed packages bring."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.commands: Any = Commands(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None if there is none."""
        command = self.commands.get(cmd_name)
        if command is None and any(cmd_name in names for names in SUBJECTS.values()):
            ctx.fail(
                f"No installed package brings {cmd_name!r}: install gpulease again (pip install -e . in a checkout)."
            )
        return command


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
    epilog="Exit codes: 0 done, 1 refused, 2 invalid usage, 3 no daemon answers, 4 lease lost; run, wait and "
    "submit --follow pass on the command's own. Set GPULEASE_URL to the daemon's address. See docs/cli.md.",
)

ARGUMENTS_LAST = {"allow_interspersed_args": False}
"""What follows the command's first argument belongs to the program that it names, options included."""
WITH_FILES = {"serve", "worker", "doctor", "db"}
"""Commands with options that configuration files may give. The library itself reads `[client]`."""


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata  # noqa: PLC0415 - 20 ms for one option

        typer.echo(f"gpulease {metadata.version('gpulease')}")
        raise typer.Exit


@app.callback()
def program(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="GPULEASE_URL",
            help="Address of the daemon: http://host:port or unix:///path; several separated by commas.",
            show_default="the local socket, else http://127.0.0.1:8750",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="GPULEASE_TOKEN",
            metavar="TOKEN",
            help="Bearer token. Visible in `ps`; prefer GPULEASE_TOKEN or the configuration file.",
        ),
    ] = None,
    daemon_user: Annotated[
        str | None,
        typer.Option(
            metavar="USER",
            envvar=DAEMON_USER_VARIABLE,
            help="As whom the daemon of this host runs; several separated by commas. Any other user who listens at its"
            " address is sent nothing.",
            show_default="root, or you",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="GPULEASE_CONFIG",
            help="The configuration file.",
            show_default="/etc/gpulease/config.toml, then ~/.config/gpulease/config.toml",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GPU leases on shared machines.

    gpulease status shows the GPUs; gpulease run -n 2 -- python train.py leases two GPUs and runs a command on them.
    """
    # For the client library, and for what `run` starts.
    variables = {"GPULEASE_URL": url, "GPULEASE_TOKEN": token, DAEMON_USER_VARIABLE: daemon_user}
    variables[config_file.VARIABLE] = config and os.path.abspath(config)
    os.environ.update({name: value for name, value in variables.items() if value})
    if context.invoked_subcommand in WITH_FILES:
        sections = config_file.load()
        settings.check(context.command, sections)
        context.default_map = settings.defaults(context.command, sections, context.invoked_subcommand)


command: Callable[..., Any]
for command in (status.status, jobs.logs, jobs.cancel, jobs.wait, metrics.metrics):
    app.command(cls=Command)(command)
for command in (acquire.acquire, acquire.renew, acquire.release, leases.explain):
    app.command(cls=Command)(command)
for command in (run.run, submit.submit):
    app.command(cls=Command, context_settings=ARGUMENTS_LAST)(command)
app.command("jobs", cls=Command)(jobs.list_jobs)
app.command("leases", cls=Command)(leases.list_leases)
app.command("events", cls=Command)(events.list_events)

configuration = group("The settings and where each comes from.")
configuration.command("show", cls=Command, context_settings=ARGUMENTS_LAST)(config.show)
configuration.command("check", cls=Command)(config.check)
app.add_typer(configuration, name="config")

nodes = group("Show nodes, take them out of use and put them back.")
nodes.command("list", cls=Command)(maintenance.list_nodes)
for command in (maintenance.drain, maintenance.resume, maintenance.pause, maintenance.forget):
    nodes.command(cls=Command)(command)
app.add_typer(nodes, name="node")

gpus = group("Take single GPUs out of use and put them back.")
for command in (maintenance.cordon, maintenance.uncordon):
    gpus.command(cls=Command)(command)
app.add_typer(gpus, name="gpu")

bearer_tokens = group("Bearer tokens for callers on other hosts.")
for command in (tokens.create, tokens.revoke):
    bearer_tokens.command(cls=Command)(command)
bearer_tokens.command("list", cls=Command)(tokens.list_tokens)
app.add_typer(bearer_tokens, name="token")
