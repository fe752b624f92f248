"""The program: its own options, and its commands by subject. `command_table` lists them."""

from __future__ import annotations

from typing import Any

import click

from gpulease_cli.command_groups import CommandGroup
from gpulease_cli.command_table import COMMANDS, SUBJECTS
from gpulease_cli.global_options import GLOBAL_OPTIONS
from gpulease_cli.help_format import HELP_OPTIONS
from gpulease_cli.parameters import Option

HELP = """GPU leases on shared machines.

gpulease status shows the GPUs; gpulease run -n 2 -- python train.py leases two GPUs and runs a command on them.
"""
EXIT_CODES = (
    "Exit codes: 0 done, 1 refused, 2 usage error, 3 no daemon answers, 4 lease lost; run, wait and submit --follow"
    " pass on the command's own. Set GPULEASE_URL to the daemon's address. `gpulease help COMMAND` has examples."
)


class Program(CommandGroup):
    """All commands; in its help under their subjects."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        for subject, rows in SUBJECTS.items():
            self.write_commands(subject, rows, formatter)


def _print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from importlib import metadata  # noqa: PLC0415 - 20 ms for one option

        click.echo(f"gpulease {metadata.version('gpulease')}")
        context.exit()


def _completion(action: str) -> Any:
    def run(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
        if asked and not context.resilient_parsing:
            from gpulease_cli import completion  # noqa: PLC0415 - needed once

            getattr(completion, action)(context.command)
            context.exit()

    return run


def _switch(*names: str, callback: Any, help: str) -> Option:
    return Option(list(names), is_flag=True, is_eager=True, expose_value=False, callback=callback, help=help)


PROGRAM = Program(
    "gpulease",
    help=HELP,
    rows=COMMANDS,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
    params=[
        *GLOBAL_OPTIONS,
        _switch("-V", "--version", callback=_print_version, help="Print the version and exit."),
        _switch(
            "--install-completion",
            callback=_completion("install"),
            help="Install completion for the current shell, and say into which file.",
        ),
        _switch(
            "--show-completion",
            callback=_completion("show"),
            help="Print the completion script of the current shell.",
        ),
    ],
)
"""The whole command line."""
