"""`gpulease worker`."""

from __future__ import annotations

import os
from dataclasses import replace

from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.parameters import option
from gpulease_cli.setting_options import takes_settings
from gpulease_worker.settings import WorkerSettings


@command(section="worker", examples=("gpulease worker --url http://127.0.0.1:8750",))
@takes_settings(WorkerSettings)
@option("--with-parent", is_flag=True, hidden=True, help="End when the parent ends.")
def worker(settings: WorkerSettings, with_parent: bool) -> int:
    """Run the worker of this host: it watches the GPUs and launches jobs."""
    with needs_extra("worker"):
        from gpulease_worker.main import run  # noqa: PLC0415 - an extra
    settings = replace(settings, token=os.environ.get("GPULEASE_TOKEN") or None, with_parent=with_parent)
    _ = settings.urls  # raises for an address that is none, before anything has been done
    return run(settings)
