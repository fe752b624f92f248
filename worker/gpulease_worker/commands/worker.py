"""`gpulease worker`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.setting_options import takes_settings
from gpulease_worker.settings import WorkerSettings


@takes_settings(WorkerSettings)
def worker(
    settings: WorkerSettings,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when the parent ends.")] = False,
) -> int:
    """Run the worker of this host: it watches the GPUs and launches jobs."""
    with needs_extra("worker"):
        from gpulease_worker.main import run  # noqa: PLC0415 - an extra
    settings = replace(settings, token=os.environ.get("GPULEASE_TOKEN") or None, with_parent=with_parent)
    _ = settings.urls  # raises for an address that is none, before anything has been done
    return run(settings)
