"""What the events of a daemon say of a sweep that went through its GPUs."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.docs.room import Room

TRIALS, GPUS = 20, 4


def events_since(room: Room, seq: int) -> list[dict[str, Any]]:
    """The events after this one, of a daemon in a room."""
    answer, _ = room.run(f"curl -s '127.0.0.1:8750/v1/events?limit=1000&after={seq}'")
    return list(json.loads(answer)["items"])


def most_at_once(events: list[dict[str, Any]]) -> int:
    """The greatest number of leases on GPUs at one time. Fails if a GPU was in two."""
    held: dict[object, list[str]] = {}
    most = 0
    for event in events:
        if event["kind"] == "lease.granted":
            gpus = event["gpus"]
            assert isinstance(gpus, list)
            taken = {gpu for others in held.values() for gpu in others}
            assert not taken.intersection(gpus), event
            held[event["lease_id"]] = gpus
        elif event["kind"] == "lease.ended":
            held.pop(event["lease_id"], None)
        most = max(most, len(held))
    assert held == {}, "every lease was given back"
    return most


def check_sweep(events: list[dict[str, Any]], printed: str | None) -> None:
    """All trials have run, never more than there are GPUs, and each lease was given back. `printed` is what the trials
    have printed; None if that went elsewhere."""
    ended = [event for event in events if event["kind"] == "lease.ended"]
    assert len(ended) == TRIALS, printed
    assert {event["reason"] for event in ended} <= {"released", "job_finished"}, ended
    assert most_at_once(events) == GPUS
    if printed is not None:
        trials = re.findall(r"trial (\d+) on (GPU-[0-9a-f-]{36}): loss", printed)
        assert sorted(int(number) for number, _ in trials) == list(range(TRIALS)), printed
        assert len({gpu for _, gpu in trials}) == GPUS
