"""`gpulease events`: what has happened."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Annotated

import typer

from gpulease import calls
from gpulease.cli import output
from gpulease.cli.options import Json
from gpulease.client import Client
from gpulease.model import Event
from gpulease.table import plain

NEWEST = 50
"""How many are shown to who does not say which."""
PAGE = 1000
"""Events in one answer, at most."""
CAUSES = {
    "request": "asked for in {}",
    "report": "seen in {}",
    "tick": "by the clock",
    "recovery": "after an outage of the database",
}
"""What led to an event, by how its cause begins."""


def list_events(
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Show what happens from now on, or after --after, until Ctrl-C.")
    ] = False,
    after: Annotated[
        int | None,
        typer.Option(metavar="SEQ", min=0, max=2**63 - 1, help="Only events after this number; 0: all that are kept."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000_000,
            show_default=f"the newest {NEWEST}; all with --after or --follow",
            help="How many, at most.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what has happened, oldest first: each event with its number, what led to it, and why."""
    with Client() as client:
        found = client.watch_events(after) if follow else _recorded(client, after, limit)
        for event in islice(found, limit):
            if json:
                output.line(event)
            else:
                output.text(in_words(event) + "\n")
            if follow:
                sys.stdout.flush()
        output.copied(client.as_of)


def _recorded(client: Client, after: int | None, limit: int | None) -> Iterator[Event]:
    """What is recorded by now after a number, or the newest."""
    if after is None:
        return iter(_newest(client, NEWEST if limit is None else limit))
    return client.events(after, PAGE if limit is None else min(limit, PAGE))


def _newest(client: Client, count: int) -> Collection[Event]:
    """The newest of those that this caller is shown: there may be others between them."""
    page, looked_at = client.send(calls.events(0, 1)), count
    while True:
        after = max(page.pruned_seq, page.last_seq - looked_at)
        found = deque(client.events(after, min(looked_at, PAGE)), maxlen=count)
        if len(found) == count or after == page.pruned_seq:
            return found
        looked_at *= 4


def in_words(event: Event) -> str:
    """An event on one line: when, number, kind, what it is about, why, and what led to it."""
    about = [event.lease_id, event.job_id, event.node and f"on {event.node}", _gpus(event.gpus)]
    parts = [" ".join(plain(word, 255) for word in about if word), plain(event.reason or "", 300)]
    what = ": ".join(part for part in parts if part)
    kind, _, _ = event.cause.partition("-")
    cause = plain(CAUSES.get(kind, "{}").format(event.cause), 100)
    return (
        f"{event.at:%Y-%m-%d %H:%M:%S}  {event.seq:>6}  {plain(event.kind):<16}  {f'{what} ' if what else ''}({cause})"
    )


def _gpus(uuids: tuple[str, ...]) -> str:
    """The beginnings of UUIDs, as `gpulease gpu cordon` takes them."""
    return ", ".join(uuid[:12] for uuid in uuids)
