"""`gpulease events`: the event history, and new events as they come."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from itertools import islice

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import Number
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol import endpoints
from gpulease_protocol.model import Event
from gpulease_protocol.status_table import printable, short_id, shortened

NEWEST = 50
"""How many are shown by default."""
PAGE = 1000
"""Maximum number of events in one answer."""


@command("events", examples=("gpulease events --limit 20", "gpulease events --after 0 --follow --json"))
@option("-f", "--follow", is_flag=True, help="Show new events, or all after --after, until Ctrl-C.")
@option(
    "--after",
    type=Number(int, 0, 2**63 - 1),
    metavar="SEQ",
    help="Only events after this number; 0 means all that are kept.",
)
@option(
    "--limit",
    type=Number(int, 1, 1_000_000_000),
    metavar="N",
    show_default=f"the newest {NEWEST}; all with --after or --follow",
    help="Show at most N events.",
)
@JSON
def list_events(follow: bool, after: int | None, limit: int | None, json: bool) -> None:
    """Show events, oldest first: number, kind, subject and reason."""
    with Client() as client:
        events = client.watch_events(after) if follow else _recorded(client, after, limit)
        for event in islice(events, limit):
            if json:
                output.print_json_line(event)
            else:
                output.print_table(format_event(event, output.terminal_width()) + "\n")
            if follow:
                sys.stdout.flush()
        output.warn_if_stale(client.as_of)


def _recorded(client: Client, after: int | None, limit: int | None) -> Iterator[Event]:
    """Recorded events after a number, or the newest."""
    if after is None:
        return iter(_newest(client, NEWEST if limit is None else limit))
    return client.events(after, PAGE if limit is None else min(limit, PAGE))


def _newest(client: Client, count: int) -> Collection[Event]:
    """The newest events that this caller may see; events of others may lie between them."""
    page, window = client.send(endpoints.events(0, 1)), count
    while True:
        after = max(page.pruned_seq, page.last_seq - window)
        newest = deque(client.events(after, min(window, PAGE)), maxlen=count)
        if len(newest) == count or after == page.pruned_seq:
            return newest
        window *= 4


def format_event(event: Event, width: int | None = None) -> str:
    """An event on one line: time of this time zone, number, kind, subject and reason. Its cause is in the JSON.

    With the width of a terminal it is short: the date only of other days, beginnings of ids, and of a job and its lease
    only the job.
    """
    job, lease = (event.job_id, event.lease_id) if width is None else _short_ids(event)
    about = [lease, job, event.node and f"on {event.node}", _gpus(event.gpus)]
    parts = [" ".join(printable(word, 255) for word in about if word), printable(event.reason or "", 300)]
    what = ": ".join(part for part in parts if part)
    at, now = event.at.astimezone(), datetime.now(UTC).astimezone()
    moment = f"{at:%H:%M:%S}" if width is not None and at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"
    line = f"{moment}  {event.seq:>6}  {printable(event.kind):<16}  {what}".rstrip()
    return line if width is None else shortened(line, width)


def _short_ids(event: Event) -> tuple[str | None, str | None]:
    job, lease = (one and short_id(one) for one in (event.job_id, event.lease_id))
    return job, None if job else lease


def _gpus(uuids: tuple[str, ...]) -> str:
    """Prefixes of UUIDs, as `gpulease gpu cordon` accepts them."""
    return ", ".join(uuid[:12] for uuid in uuids)
