"""`gpulease status`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli import output, screen
from gpulease.cli.options import Json
from gpulease.client import Client
from gpulease.errors import DaemonUnavailable, InvalidRequest, Unavailable
from gpulease.model import JobState, LeaseState
from gpulease.table import plain, render

LOOK_S = 1.0
"""How often `--watch` looks: as often as the worker reads the hardware."""


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
        with suppress(KeyboardInterrupt):
            if sys.stdout.isatty():
                with screen.whole() as show:
                    _redraw(client, show)
            while True:
                output.text(_table(client))
                sys.stdout.flush()
                output.copied(client.as_of)
                time.sleep(LOOK_S)


def _redraw(client: Client, show: Callable[[str], None]) -> None:
    """Show the table every second. While nobody answers the last one stays, under what is wrong."""
    table = ""
    while True:
        try:
            table = _table(client)
            note = "" if client.as_of is None else f"This is a copy as of {client.as_of}; gpulease doctor says why.\n\n"
        except (DaemonUnavailable, Unavailable) as error:
            note = f"{plain(error.detail, 300)} Trying again; Ctrl-C ends.\n\n"
        show(note + table)
        time.sleep(LOOK_S)


def _table(client: Client) -> str:
    gpus = client.gpus()
    leases = client.leases((LeaseState.QUEUED, LeaseState.ACTIVE))
    jobs = client.jobs([state for state in JobState if not state.final])
    return render(gpus, leases, jobs, datetime.now(UTC), client.nodes())
