"""`gpulease serve`."""

from __future__ import annotations

import gc
from dataclasses import replace

import click

from gpulease_cli import settings as program_settings
from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.setting_options import takes_settings
from gpulease_protocol.host import config_file
from gpulease_server.settings import ServeSettings


@command(section="serve", examples=("gpulease serve", "gpulease serve --simulate 4 --port 0"))
@takes_settings(ServeSettings)
@click.pass_context
def serve(context: click.Context, settings: ServeSettings) -> int:
    """Run the daemon, and a worker for this host."""
    gc.disable()  # until the daemon serves: what is imported stays
    try:
        with needs_extra("server"):
            from gpulease_server.main import serve as run_daemon  # noqa: PLC0415 - an extra
        options = program_settings.worker_options(context.find_root().command, config_file.load())
        options += _switch("kill-leftovers", settings.kill_leftovers)
        options += _switch("manage-compute-mode", settings.manage_compute_mode)
        return run_daemon(replace(settings, worker_options=options))
    finally:
        gc.enable()


def _switch(name: str, on: bool | None) -> tuple[str, ...]:
    """The option for a switch; none where it was not set."""
    return () if on is None else (f"--{name}" if on else f"--no-{name}",)
