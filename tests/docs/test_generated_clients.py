"""docs/generated-clients.md: each generator makes a client without a warning, and a sweep runs with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.room import Room
from tests.sweep_events import GPUS, check_sweep, events_since

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GENERATORS = ROOT / ".venv" / "generators"
"""`make generators` puts them there, as tests/generated pins them."""
(TRIAL,) = (block.text for block in blocks(ROOT / "docs" / "sweeps.md") if block.note("saved as") == "trial.py")


@pytest.mark.budget(120)
def test_a_sweep_runs_with_each_generated_client(tmp_path: Path) -> None:
    assert (GENERATORS / ".installed").exists(), "run make generators"
    room, sweeps = Room(tmp_path), []
    (room.home / "trial.py").write_text(TRIAL)
    (room.home / "package.json").write_text('{ "type": "module" }\n')
    try:
        room.start(f"gpulease serve --simulate {GPUS}")
        # Not a link, behind which a generator would look for the settings of the project.
        mount = f"mkdir node_modules && mount --bind {GENERATORS}/node_modules node_modules"
        printed, code = room.run(f"export PATH={GENERATORS}/python/bin:$PATH NO_COLOR=1; {mount}")
        assert code == 0, printed
        seq = 0
        for block in blocks(ROOT / "docs" / "generated-clients.md"):
            if (name := block.note("saved as")) is not None:
                (room.home / name).write_text(block.text)
                continue
            printed, code = room.run(block.text)
            assert code == 0, f"{block.text}{printed}\n{room.story()}"
            assert not re.search("warn|skip|deprecat", printed, re.IGNORECASE), printed
            events = events_since(room, seq)
            if any(event["kind"].startswith("lease.") for event in events):
                check_sweep(events, printed)
                sweeps.append(block.text)
            seq = max([seq, *(event["seq"] for event in events)])
    finally:
        room.close()
    assert [text.split()[-1] for text in sweeps] == ["generated_sweep.py", "sweep_fetch.js", "sweep_functions.js"]
