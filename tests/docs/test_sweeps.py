"""The clients of docs/sweeps.md: each brings 20 trials through four GPUs, as an event log of the daemon tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.room import Room

pytestmark = pytest.mark.timeout(600)

PAGE = blocks(ROOT / "docs" / "sweeps.md")
FILES = {str(block.note("saved as")): block for block in PAGE if block.note("saved as") is not None}
CLIENTS = {name: block for name, block in FILES.items() if name != "trial.py"}
TRIALS, GPUS = 20, 4


def read_page(room: Room) -> list[tuple[Block, str, list[dict[str, object]]]]:
    """What each block that is typed prints, and the events that it has caused."""
    room.start(f"gpulease serve --simulate {GPUS}")
    for name, block in FILES.items():
        (room.home / name).write_text(block.text)
    done, seq = [], 0
    for block in PAGE:
        if block.language != "bash" or block in FILES.values():
            continue
        printed, code = room.run(block.text)
        assert code == 0, f"{block.text}{printed}\n{room.story()}"
        answer, _ = room.run(f"curl -s '127.0.0.1:8750/v1/events?limit=1000&after={seq}'")
        events = json.loads(answer)["items"]
        seq = events[-1]["seq"]
        done.append((block, printed, events))
    return done


def most_at_once(events: list[dict[str, object]]) -> int:
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


@pytest.mark.slow
def test_a_sweep_goes_through_the_gpus(tmp_path: Path) -> None:
    room = Room(tmp_path)
    try:
        done = read_page(room)
    finally:
        room.close()
    assert [block.text.split()[0] for block, _, _ in done] == ["python", "bash", "node", "sweep=$(gpulease"]
    for block, printed, events in done:
        ended = [event for event in events if event["kind"] == "lease.ended"]
        assert len(ended) == TRIALS, block.text
        assert {event["reason"] for event in ended} <= {"released", "job_finished"}, ended
        assert most_at_once(events) == GPUS
        if "sweep=" not in block.text:
            trials = re.findall(r"trial (\d+) on (GPU-[0-9a-f-]{36}): loss", printed)
            assert sorted(int(number) for number, _ in trials) == list(range(TRIALS)), printed
            assert len({gpu for _, gpu in trials}) == GPUS


def test_a_gpu_in_two_leases_would_be_seen() -> None:
    granted = [{"kind": "lease.granted", "lease_id": lease, "gpus": ["GPU-1"]} for lease in ("a", "b")]
    ended = [{"kind": "lease.ended", "lease_id": lease} for lease in ("a", "b")]
    assert most_at_once([granted[0], ended[0], granted[1], ended[1]]) == 1
    with pytest.raises(AssertionError):
        most_at_once([granted[0], granted[1], *ended])


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_fewer_than_20_lines(name: str) -> None:
    assert len([line for line in CLIENTS[name].text.splitlines() if line.strip(" }")]) < 20
