"""`gpulease events`: the event history, and new events as they come."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.names import find_gpu, find_job, find_lease
from gpulease_cli.option_types import MOMENT, Number
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol import endpoints
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.event_choice import EventChoice
from gpulease_protocol.events import KINDS
from gpulease_protocol.model import Event
from gpulease_protocol.status_table import printable, short_id, shortened

NEWEST = 50
"""How many are shown by default."""
PAGE = 1000
"""Maximum number of events in one answer."""


@command(
    "events",
    examples=(
        "gpulease events --limit 20",
        "gpulease events --since 03:00 --until 04:00 --kind gpu --kind lease.ended",
        "gpulease events --after 0 --follow --json",
    ),
)
@option("-f", "--follow", is_flag=True, help="Show new events, or all after --after, until Ctrl-C.")
@option(
    "--after",
    type=Number(int, 0, 2**63 - 1),
    metavar="SEQ",
    help="Only events after this number; 0 means all that are kept.",
)
@option(
    "--since",
    type=MOMENT,
    metavar="TIME",
    help="Only newer events: 03:00, 2026-11-23T18:00, or 2h ago as 2h.",
)
@option("--until", type=MOMENT, metavar="TIME", help="Only events before then.")
@option(
    "--kind",
    "kinds",
    metavar="KIND",
    multiple=True,
    help="Only this kind: lease.granted, or lease for all of leases.",
)
@option("--user", metavar="USER", help="Only events of leases and jobs of this user.")
@option("--gpu", metavar="GPU", help="Only events of this GPU: INDEX, NODE:INDEX or UUID.")
@option("--node", metavar="NODE", help="Only events of this node.")
@option("--lease", metavar="LEASE", help="Only events of this lease.")
@option("--job", metavar="JOB", help="Only events of this job.")
@option(
    "--limit",
    type=Number(int, 1, 1_000_000_000),
    metavar="N",
    show_default=f"the newest {NEWEST}; all with --after, --since or --follow",
    help="Show at most N events.",
)
@JSON
def list_events(follow: bool, after: int | None, limit: int | None, json: bool, **wanted: Any) -> None:
    """Show events, oldest first: number, kind, subject and reason."""
    if follow and (given := [f"--{name.rstrip('s')}" for name, value in wanted.items() if value]):
        raise InvalidRequest(
            f"--follow shows all events, and takes no {' or '.join(given)}.",
            remedy="Leave one of them out, or choose with `--follow --json | grep`.",
        )
    with Client() as client:
        choice = _choice(client, **wanted)
        events: Iterable[Event]
        if follow:
            events = client.watch_events(after)
        elif after is None and choice["from_at"] is None:
            events = _newest(client, NEWEST if limit is None else limit, choice)
        else:
            events = client.events(after or 0, PAGE if limit is None else min(limit, PAGE), **choice)
        count = 0
        for count, event in enumerate(islice(events, limit), 1):  # noqa: B007 - it is looked at afterwards
            if json:
                output.print_json_line(event)
            else:
                output.print_table(format_event(event, output.terminal_width()) + "\n")
            if follow:
                sys.stdout.flush()
        output.warn_if_stale(client.as_of)
    if not count:
        _check_kinds(choice["kinds"])


def _check_kinds(kinds: Iterable[str]) -> None:
    """Raise InvalidRequest for a kind that does not exist. Call it where nothing was found: a newer daemon may have
    more of them."""
    for kind in kinds:
        noun, dot, verb = kind.partition(".")
        if noun not in KINDS:
            raise InvalidRequest(f"--kind: there is no kind {kind!r}.", remedy=f"Name one of {', '.join(KINDS)}.")
        if dot and verb not in KINDS[noun]:
            known = ", ".join(f"{noun}.{word}" for word in KINDS[noun])
            raise InvalidRequest(f"--kind: there is no kind {kind!r}.", remedy=f"Name {noun}, or one of {known}.")


def _choice(
    client: Client,
    since: datetime | None,
    until: datetime | None,
    kinds: tuple[str, ...],
    user: str | None,
    gpu: str | None,
    node: str | None,
    lease: str | None,
    job: str | None,
) -> EventChoice:
    """The events that these options mean. Raises NotFound, InvalidRequest."""
    return EventChoice(
        from_at=since,
        to_at=until,
        kinds=kinds,
        user=user,
        gpu=gpu and find_gpu(client, gpu).uuid,
        node=node,
        lease=lease and find_lease(client, lease)[0],
        job=job and find_job(client, job).id,
    )


def _newest(client: Client, count: int, choice: EventChoice) -> Iterable[Event]:
    """The newest of these events that this caller may see, oldest first."""
    if any(choice.values()):
        return reversed(tuple(islice(client.events(0, min(count, PAGE), newest_first=True, **choice), count)))
    # A daemon of an older release knows no other order. Events that others alone may see may lie between these.
    page, window = client.send(endpoints.events(0, 1)), count
    while True:
        after = max(page.pruned_seq, page.last_seq - window)
        newest = deque(client.events(after, min(window, PAGE)), maxlen=count)
        if len(newest) == count or after == page.pruned_seq:
            return newest
        window *= 4


def format_event(event: Event, width: int | None = None) -> str:
    """An event on one line: number, kind, subject and reason, with times of this time zone. Its cause is in the JSON.

    With the width of a terminal it is short: the date only of other days, beginnings of ids, and of a job and its lease
    only the job.
    """
    job, lease = (event.job_id, event.lease_id) if width is None else _short_ids(event)
    about = [lease, job, event.node and f"on {event.node}", _gpus(event.gpus)]
    reason = output.local_times(event.reason or "")
    parts = [" ".join(printable(word, 255) for word in about if word), printable(reason, 300)]
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
