"""`gpulease worker`."""

from __future__ import annotations

import os
from dataclasses import replace

import click
from click.core import ParameterSource

from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.parameters import option
from gpulease_cli.setting_options import takes_settings
from gpulease_protocol.host import token_file, variables
from gpulease_worker.settings import WorkerSettings


@command(section="worker", examples=("gpulease worker --url http://127.0.0.1:8750",))
@takes_settings(WorkerSettings)
@option("--with-parent", is_flag=True, hidden=True, help="End when the parent ends.")
def worker(settings: WorkerSettings, with_parent: bool) -> int:
    """Run the worker of this host: it watches the GPUs and launches jobs."""
    with needs_extra("worker"):
        from gpulease_worker.main import run  # noqa: PLC0415 - an extra
    settings = _with_token(settings, with_parent)
    _ = settings.urls, settings.allocation_pids  # raises for what is not known, before anything has been done
    return run(settings)


def _with_token(settings: WorkerSettings, with_parent: bool) -> WorkerSettings:
    """With the bearer token: of the file in the option, else GPULEASE_TOKEN, else of the file that is named elsewhere.
    A file that does not count is no longer named."""
    source, named = click.get_current_context().get_parameter_source("token_file"), settings.token_file
    token = os.environ.get(variables.TOKEN) or None
    if named is not None and (source is ParameterSource.COMMANDLINE or token is None):
        token = token_file.read(str(named), "--token-file")
    else:
        named = None
    return replace(settings, token=token, token_file=named, with_parent=with_parent)
