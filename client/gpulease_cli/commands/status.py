"""`gpulease status`: once, or redrawn on the terminal's alternate screen."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from functools import partial

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.errors import DaemonUnavailable, InvalidRequest, Unavailable
from gpulease_protocol.status_table import printable

REFRESH_S = 1.0
"""Time between two refreshes of `--watch`: as often as the worker reads the hardware."""


@command(examples=("gpulease status", "gpulease status --watch"))
@option("-w", "--watch", is_flag=True, help="Refresh every second until q or Ctrl-C.")
@JSON
def status(watch: bool, json: bool) -> None:
    """Show the GPUs, who holds each and until when, and who waits."""
    if watch and json:
        raise InvalidRequest(
            "--watch and --json cannot be combined.", remedy="Programs can read the stream GET /v1/events."
        )
    with Client() as client:
        if json:
            output.print_json_list(client.gpus())
            output.warn_if_stale(client.as_of)
            return
        if not watch:
            output.print_table(Snapshot.fetch(client).table(output.terminal_width()))
            output.warn_if_stale(client.as_of)
            return
        with suppress(KeyboardInterrupt):
            if sys.stdout.isatty():
                from gpulease_cli.screen import Screen, redraw  # noqa: PLC0415 - for --watch only

                with Screen() as screen:
                    redraw(screen, partial(_picture, client), REFRESH_S, output.colored)
                return
            _print_forever(client)


def _print_forever(client: Client) -> None:
    """Print one table after the other. Raises DaemonUnavailable or Unavailable if no daemon answers the first time;
    a later outage is said once."""
    answers = None
    while True:
        try:
            now = Snapshot.fetch(client)
        except (DaemonUnavailable, Unavailable) as error:
            if answers is None:
                raise
            if answers:
                output.say(f"gpulease: {printable(error.detail, 300)} Trying again.\n")
            answers = False
        else:
            answers = True
            output.print_table(now.table(None))
            sys.stdout.flush()
            output.warn_if_stale(client.as_of)
        time.sleep(REFRESH_S)


def _picture(client: Client, width: int) -> str:
    now = Snapshot.fetch(client)
    note = "" if now.as_of is None else f"This is a copy as of {now.as_of}; see gpulease doctor.\n\n"
    return note + now.table(width)
