"""`gpulease status`."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli import output
from gpulease.cli.options import Json
from gpulease.client import Client
from gpulease.errors import InvalidRequest
from gpulease.model import JobState, LeaseState
from gpulease.table import render

LOOK_S = 1.0
"""How often `--watch` looks: as often as the worker reads the hardware."""
CLEAR = "\x1b[H\x1b[J"
"""Moves a terminal's cursor to the top, and clears all below it."""


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, every second, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show the GPUs, who holds each and until when, and who waits."""
    if watch and json:
        raise InvalidRequest(
            "--watch and --json exclude each other.", remedy="GET /v1/events is the stream for programs."
        )
    with Client() as client:
        if json:
            output.nouns(client.gpus())
            output.copied(client.as_of)
            return
        if not watch:
            output.text(_table(client))
            output.copied(client.as_of)
            return
        try:
            while True:
                table = _table(client)
                sys.stdout.write(CLEAR if sys.stdout.isatty() else "")
                output.text(table)
                sys.stdout.flush()
                output.copied(client.as_of)
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            return


def _table(client: Client) -> str:
    gpus = client.gpus()
    leases = client.leases((LeaseState.QUEUED, LeaseState.ACTIVE))
    jobs = client.jobs([state for state in JobState if not state.final])
    return render(gpus, leases, jobs, datetime.now(UTC), client.nodes())
