"""`gpulease status`: once, or redrawn on the terminal's alternate screen."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.errors import DaemonUnavailable, InvalidRequest, Unavailable
from gpulease_protocol.model import JobState, LeaseState
from gpulease_protocol.status_table import printable, render_status

REFRESH_S = 1.0
"""Time between two refreshes of `--watch`: as often as the worker reads the hardware."""
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the terminal's alternate screen without a cursor, and back to what was there before."""
TOP, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@command(examples=("gpulease status", "gpulease status --watch"))
@option("-w", "--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@JSON
def status(watch: bool, json: bool) -> None:
    """Show the GPUs, who holds each and until when, and who waits."""
    if watch and json:
        raise InvalidRequest(
            "--watch and --json exclude each other.", remedy="Programs can read the stream GET /v1/events."
        )
    with Client() as client:
        if json:
            output.print_json_list(client.gpus())
            output.warn_if_stale(client.as_of)
            return
        if not watch:
            output.print_table(_table(client, output.terminal_width()))
            output.warn_if_stale(client.as_of)
            return
        with suppress(KeyboardInterrupt):
            if sys.stdout.isatty():
                with _alternate_screen() as show:
                    _redraw(client, show)
            while True:
                output.print_table(_table(client, None))
                sys.stdout.flush()
                output.warn_if_stale(client.as_of)
                time.sleep(REFRESH_S)


def _redraw(client: Client, show: Callable[[str], None]) -> None:
    """Show the table every second. While the daemon does not answer, the last table stays, under the error."""
    table = ""
    while True:
        try:
            table = _table(client, shutil.get_terminal_size().columns - 1)
            note = "" if client.as_of is None else f"This is a copy as of {client.as_of}; see gpulease doctor.\n\n"
        except (DaemonUnavailable, Unavailable) as error:
            note = f"{printable(error.detail, 300)} Retrying; Ctrl-C stops.\n\n"
        show(note + table)
        time.sleep(REFRESH_S)


def _table(client: Client, width: int | None) -> str:
    gpus = client.gpus()
    leases = client.leases((LeaseState.QUEUED, LeaseState.ACTIVE))
    jobs = client.jobs([state for state in JobState if not state.final])
    return render_status(gpus, leases, jobs, datetime.now(UTC), client.nodes(), width=width)


@contextmanager
def _alternate_screen() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a text in place of the last one, cut to the screen's size."""
    sys.stdout.write(ENTER)
    try:
        yield _draw
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def _draw(text: str) -> None:
    columns, rows = shutil.get_terminal_size()
    lines = text.rstrip("\n").split("\n")
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... and {len(lines) - rows + 1} more lines"]
    # Not into the last column: a terminal may then apply the clearing to the next line, or to the last letter.
    cropped = "\n".join(line[: columns - 1] for line in lines)
    # Each line overwrites the old one and is cleared from its end on, so nothing flickers.
    drawn = output.colored(cropped).replace("\n", f"{CLEAR_LINE}\n")
    sys.stdout.write(f"{TOP}{drawn}{CLEAR_LINE}{CLEAR_BELOW}")
    sys.stdout.flush()
