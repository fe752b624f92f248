"""The clients of docs/sweeps.md: each brings 20 trials through four GPUs, as an event log of the daemon tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.room import Room
from tests.sweep_events import GPUS, check_sweep, events_since, most_at_once

pytestmark = pytest.mark.timeout(600)

PAGE = blocks(ROOT / "docs" / "sweeps.md")
FILES = {str(block.note("saved as")): block for block in PAGE if block.note("saved as") is not None}
CLIENTS = {name: block for name, block in FILES.items() if name != "trial.py"}


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
        events = events_since(room, seq)
        seq = events[-1]["seq"]
        done.append((block, printed, events))
    return done


@pytest.mark.slow
def test_a_sweep_goes_through_the_gpus(tmp_path: Path) -> None:
    room = Room(tmp_path)
    try:
        done = read_page(room)
    finally:
        room.close()
    assert [block.text.split()[0] for block, _, _ in done] == ["python", "bash", "node", "sweep=$(gpulease"]
    for block, printed, events in done:
        check_sweep(events, None if "sweep=" in block.text else printed)


def test_a_gpu_in_two_leases_would_be_seen() -> None:
    granted = [{"kind": "lease.granted", "lease_id": lease, "gpus": ["GPU-1"]} for lease in ("a", "b")]
    ended = [{"kind": "lease.ended", "lease_id": lease} for lease in ("a", "b")]
    assert most_at_once([granted[0], ended[0], granted[1], ended[1]]) == 1
    with pytest.raises(AssertionError):
        most_at_once([granted[0], granted[1], *ended])


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_fits_on_a_screen(name: str) -> None:
    assert len([line for line in CLIENTS[name].text.splitlines() if line.strip(" }")]) < 35
