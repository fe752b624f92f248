"""Every command block of the README and of docs/ runs as it is written, and shows what the page says that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.docs.pages import LANGUAGES, ROOT, Block, Names, blocks, commands
from tests.docs.room import Room

pytestmark = pytest.mark.timeout(600)

PAGES = [ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {
    *(ROOT / "docs" / "launchers").iterdir(),
    *(ROOT / "docs" / "tools").iterdir(),
    *(ROOT / "docs" / name for name in ("sweeps.md", "generated-clients.md", "install.md", "howto/kubernetes.md")),
}
"""tests/tools, tests/system/test_launcher_pages.py, test_install.py and test_kubernetes.py, test_sweeps.py and
test_generated_clients.py run these, and look at the result."""
PROGRAMS = {"python": "python -W error", "javascript": "node"}
TYPED = {"bash", "console", *PROGRAMS}
MOST_NOT_RUN = 29
HIDDEN = re.compile(r"^\s*(\$ |curl |make |gpulease (?!waits ))", re.MULTILINE)
"""A line that someone types. `gpulease waits` is what the program says."""
GIVE_BACK = """
unset ${!GPULEASE_*}
for job in $(curl -s '127.0.0.1:8750/v1/jobs?limit=1000' | jq -r '.items[] | select(.ended_at == null) | .id'); do
    curl -s -o /dev/null 127.0.0.1:8750/v1/jobs/$job/cancel -H 'Content-Type: application/json' -d '{"grace_s": 0}'
done
curl -s '127.0.0.1:8750/v1/leases?limit=1000' |
    jq -rc '.items[] | select(.ended_at == null and .job_id == null) | .id, {token}' |
    while read -r lease && read -r proof; do
        curl -s -o /dev/null 127.0.0.1:8750/v1/leases/$lease/release -H 'Content-Type: application/json' -d "$proof"
    done
for n in {1..300}; do
    [ "$(curl -s 127.0.0.1:8750/v1/gpus | jq -c '[.items[].state] | unique')" = '["free"]' ] && break; sleep 0.1
done
test "$n" -lt 300
"""


def of_page(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.note("not run") is None]


RUN = [page for page in PAGES if page not in RUN_ELSEWHERE and any(b.language in TYPED for b in of_page(page))]


class Reader:
    """Somebody who does what a page says."""

    def __init__(self, room: Room, page: Path) -> None:
        self.room, self.page, self.names = room, page, Names()

    def read(self) -> None:
        found = of_page(self.page)
        if not any(block.note("in another terminal") is not None for block in found):
            self.room.start("gpulease serve --simulate 4")
        for block in found:
            self.do(block)

    def do(self, block: Block) -> None:
        self.prepare(block)
        if (name := block.note("saved as")) is not None:
            (self.room.home / name).write_text(block.text)
        elif block.note("in another terminal") is not None:
            self.room.start(self.names.apply(block.text))
        elif (code := block.note("exits")) is not None:
            output, ended = self.room.run(self.names.apply(block.text))
            assert str(ended) in re.findall(r"\d+", code.split(":")[0]), output
        elif block.language == "console":
            self.converse(block)
        elif block.language == "bash":
            self.succeeds(block.text, block)
        elif block.language in PROGRAMS:
            (self.room.home / "program.mjs").write_text(self.names.apply(block.text))
            self.succeeds(f"{PROGRAMS[block.language]} program.mjs", block)

    def prepare(self, block: Block) -> None:
        """What the comments say that comes first."""
        for note in block.notes:
            if note == "after everything was given back":
                self.succeeds(GIVE_BACK, block)
            elif note.startswith("first:"):
                self.succeeds(note.removeprefix("first:").strip(), block)
            elif said := re.match(r"let (\S+): (.*)", note, re.DOTALL):
                self.names.real[said[1]] = self.succeeds(said[2], block).strip()

    def succeeds(self, command: str, block: Block) -> str:
        """What commands print, each of which must succeed."""
        output, code = self.room.run(f"set -e\n{self.names.apply(command)}\nset +e")
        assert code == 0, f"{self.page.name}:{block.line} ends with {code}:\n{output}\n{self.room.story()}"
        return output

    def converse(self, block: Block) -> None:
        for typed, expected in commands(block.text):
            output, _ = self.room.run(self.names.apply(typed))
            if not self.names.learn(expected, output):
                shown = "\n".join(unified_diff(expected.splitlines(), output.splitlines(), "page", "run", lineterm=""))
                pytest.fail(f"{self.page.name}:{block.line}: $ {typed}\n{shown}\n{self.room.story()}", pytrace=False)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    opened = Room(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_as_it_says(room: Room, page: Path) -> None:
    Reader(room, page).read()


def test_every_block_says_what_it_is() -> None:
    strange = [
        f"{page.name}:{b.line}: {b.language}" for page in PAGES for b in blocks(page) if b.language not in LANGUAGES
    ]
    assert strange == []


def test_no_command_hides_in_a_block_that_is_not_run() -> None:
    hidden = [
        f"{page.name}:{block.line}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in TYPED and HIDDEN.search(block.text)
    ]
    assert hidden == []


def test_every_fence_is_a_block() -> None:
    for page in PAGES:
        assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) == 2 * len(blocks(page)), page


def test_what_is_not_run_has_a_reason_and_is_little() -> None:
    reasons = {f"{page.name}:{b.line}": b.note("not run") for page in PAGES for b in blocks(page)}
    given = {place: reason for place, reason in reasons.items() if reason is not None}
    assert all(len(reason) > 10 for reason in given.values()), given
    assert len(given) <= MOST_NOT_RUN, given


def test_json_is_json() -> None:
    for block in (block for page in PAGES for block in blocks(page) if block.language == "json"):
        json.loads(block.text)
