"""The page's own computing, in node: it says what gpulease.table says, and reads a stream in pieces of any size."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpulease import table
from gpulease.model import Demand, Holder, Selection
from gpulease_server import dashboard

FOLDER = Path(dashboard.__file__).parent
HOLDERS = [
    Holder(user="root", label="ada: resnet"),
    Holder(user="ada", host="h", owner_pid=42),
    Holder(user="ada", label="digits"),
    Holder(host="elsewhere"),
    Holder(),
    Holder(user="ada", label="l" * 40),
    Holder(user="ada", label="two\nlines \u202eturned\x1b[31m\u2028 \u00a0\u00e4"),
    None,
]
DEMANDS = [
    Demand(),
    Demand(count=3, gpu_model="H100", min_free_memory_bytes=40 * 2**30, node="n1"),
    Demand(selection=Selection.LISTED, indices=(0, 2), uuids=("GPU-bf4cfdfc-6704-51ec-b10d-d2de1ed9525f",)),
    Demand(selection=Selection.ALL),
    Demand(selection=Selection.AUTO, node="n2"),
]
SECONDS = [-1, 0, 0.9, 59, 60, 185, 3599, 3600, 7800, 86399, 86400, 273600.5]
SIZES = [None, 0, 1, 2**30, 15 * 2**29, 80 * 2**30]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules where node takes them for what they are."""
    place = tmp_path_factory.mktemp("modules")
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, place)
    (place / "package.json").write_text('{"type": "module"}')
    return place


def in_node(modules: Path, program: str, given: Any) -> Any:
    """What a program makes of `given`: it ends with an expression."""
    source = f'import {{ readFileSync }} from "node:fs";\nconst given = JSON.parse(readFileSync(0, "utf8"));\n{program}'
    command = ["node", "--input-type=module", "-e", source]
    ran = subprocess.run(
        command, cwd=modules, input=json.dumps(given), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_page_says_what_the_terminal_says(modules: Path) -> None:
    holders = TypeAdapter(list[Holder | None]).dump_python(HOLDERS, mode="json")
    demands = TypeAdapter(list[Demand]).dump_python(DEMANDS, mode="json")
    said = in_node(
        modules,
        """
        import * as format from "./format.js";
        console.log(JSON.stringify({
            who: given.holders.map((holder) => format.who(holder)),
            jobs: given.holders.map((holder) => format.who(holder, "digits")),
            asked: given.demands.map(format.askedFor),
            durations: given.seconds.map(format.duration),
            sizes: given.sizes.map(format.gibibytes),
            percents: [null, 0, 0.004, 0.93, 1].map(format.percent),
        }));
        """,
        {"holders": holders, "demands": demands, "seconds": SECONDS, "sizes": SIZES},
    )

    assert said == {
        "who": [table.who(holder) for holder in HOLDERS],
        "jobs": [table.who(holder, "digits") for holder in HOLDERS],
        "asked": [table.asked_for(demand) for demand in DEMANDS],
        "durations": [table.duration(seconds) for seconds in SECONDS],
        "sizes": [table.gibibytes(size) for size in SIZES],
        "percents": ["?", "0%", "0%", "93%", "100%"],
    }


def test_a_log_keeps_its_lines_and_loses_what_steers(modules: Path) -> None:
    texts = ["a\nb\tc", "\x1b[31mred\x1b[0m", "10%\r50%\r100%\ndone", "windows\r\nline", "bell\x07 \u202eback"]
    said = in_node(
        modules, 'import * as f from "./format.js"; console.log(JSON.stringify(given.map(f.printed)));', texts
    )
    assert said == ["a\nb\tc", "red", "100%\ndone", "windows\nline", "bell? ?back"]


def test_a_carriage_return_overwrites_its_line(modules: Path) -> None:
    texts = ["".join(letters) for length in range(6) for letters in itertools.product("a\r\n", repeat=length)]
    said = in_node(
        modules, 'import * as f from "./format.js"; console.log(JSON.stringify(given.map(f.printed)));', texts
    )
    assert said == ["\n".join(line.rstrip("\r").split("\r")[-1] for line in text.split("\n")) for text in texts]


@pytest.mark.parametrize("letters", ["a", "\r", "a\r", "\x1b[1", "\r\n"])
def test_a_long_line_of_a_log_takes_no_time(modules: Path, letters: str) -> None:
    took_ms = in_node(
        modules,
        """
        import { printed } from "./format.js";
        const begun = process.cpuUsage();
        printed(given);
        console.log(process.cpuUsage(begun).user / 1000);
        """,
        letters * (200_000 // len(letters)),
    )
    assert took_ms < 2000  # some 10 ms; with a regular expression that tries every start, half a minute


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_read_in_pieces_of_any_size(modules: Path, size: int) -> None:
    stream = (
        "retry: 1000\nid: 6\n\n: nothing new\n\nid: 7\nevent: lease.granted\ndata: {\"seq\": 7}\n\n"
        "id: 8\r\nevent: x\r\ndata: one\r\ndata: two\r\n\r\nid: 9\nevent: cut off\ndata: lost"
    )  # fmt: skip
    said = in_node(
        modules,
        """
        import { reader } from "./stream.js";
        const said = [];
        const take = reader((id) => said.push(id), (kind, data) => said.push([kind, data]));
        for (const piece of given) take(piece);
        console.log(JSON.stringify(said));
        """,
        [stream[at : at + size] for at in range(0, len(stream), size)],
    )
    assert said == ["6", "7", ["lease.granted", '{"seq": 7}'], "8", ["x", "one\ntwo"], "9"]


def test_time_is_the_daemons(modules: Path) -> None:
    said = in_node(
        modules,
        """
        import * as clock from "./clock.js";
        const here = Date.now();
        clock.heard(new Date(given.there * 1000).toUTCString(), here - 10, here + 10);
        const ahead = clock.nowMs() - Date.now();
        clock.heard("nonsense", here, here);
        clock.heard(null, here, here);
        clock.heard(new Date(given.there * 1000 + 999).toUTCString(), here + 300, here + 320);
        console.log(JSON.stringify([clock.nowMs() / 1000, clock.nowMs() - Date.now() === ahead]));
        """,
        {"there": datetime(2031, 5, 6, tzinfo=UTC).timestamp()},
    )
    assert said[0] == pytest.approx(datetime(2031, 5, 6, tzinfo=UTC).timestamp(), abs=5)
    assert said[1] is True


def schemes() -> list[dict[str, str]]:
    """The colours of the style sheet, light and dark, by name."""
    light, dark = re.findall(r":root \{(.*?)\}", (FOLDER / "dashboard.css").read_text(), re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text)) for text in (light, dark)]


@pytest.mark.parametrize("colours", schemes(), ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(colours: dict[str, str]) -> None:
    """Level AA of WCAG 2.2: 4.5 to 1 for text, 3 to 1 for marks."""
    for back in ("page", "sheet"):
        for text in ("text", "quiet", "link", "red"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
        for mark in ("green", "blue", "amber", "violet", "orange", "red", "grey"):
            assert contrast(colours[mark], colours[back]) >= 3.0, (mark, back)
    assert contrast(colours["alarm-text"], colours["alarm-back"]) >= 4.5
    assert contrast(colours["bar"], colours["track"]) >= 3.0


def contrast(one: str, other: str) -> float:
    """The ratio of their luminances, the lighter over the darker."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
