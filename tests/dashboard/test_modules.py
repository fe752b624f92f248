"""The page's own computing, in node: it says what `status_table` says, and reads a stream in pieces of any size."""

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

from gpulease_protocol import status_table
from gpulease_protocol.model import Demand, Holder, Priority, Selection, TopologyMode
from gpulease_server import dashboard

FOLDER = Path(dashboard.__file__).parent / "page"
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
    Demand(count=4, nodes=3, gpu_model="H100"),
    Demand(selection=Selection.ALL),
    Demand(count=4, gpu_model="H100", topology=TopologyMode.REQUIRED),
    Demand(count=2, priority=Priority.SCAVENGE, preemptible=True),
    Demand(count=2, priority=Priority.INTERACTIVE, preemptible=True, gpu_model="H100"),
    Demand(selection=Selection.AUTO, node="n2"),
]
SECONDS = [-1, 0, 0.9, 59, 60, 185, 3599, 3600, 7800, 86399, 86400, 273600.5]
SIZES = [None, 0, 1, 2**30, 15 * 2**29, 80 * 2**30]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules where node takes them for what they are."""
    place = tmp_path_factory.mktemp("modules")
    shutil.copytree(FOLDER, place, dirs_exist_ok=True)
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


def test_the_page_uses_the_words_of_the_terminal(modules: Path) -> None:
    holders = TypeAdapter(list[Holder | None]).dump_python(HOLDERS, mode="json")
    demands = TypeAdapter(list[Demand]).dump_python(DEMANDS, mode="json")
    said = in_node(
        modules,
        """
        import * as format from "./format.js";
        console.log(JSON.stringify({
            who: given.holders.map((holder) => format.who(holder)),
            jobs: given.holders.map((holder) => format.who(holder, "digits")),
            unnamed: given.holders.map((holder) => format.who(holder, "job-82c4b92c1f47e880")),
            asked: given.demands.map((demand) => format.askedFor(demand)),
            durations: given.seconds.map(format.duration),
            sizes: given.sizes.map(format.gibibytes),
            percents: [null, 0, 0.004, 0.93, 1].map(format.percent),
        }));
        """,
        {"holders": holders, "demands": demands, "seconds": SECONDS, "sizes": SIZES},
    )

    assert said == {
        "who": [status_table.describe_holder(holder) for holder in HOLDERS],
        "jobs": [status_table.describe_holder(holder, "digits") for holder in HOLDERS],
        "unnamed": [status_table.describe_holder(holder, "job-82c4b92c1f47e880") for holder in HOLDERS],
        "asked": [status_table.describe_demand(demand) for demand in DEMANDS],
        "durations": [status_table.format_duration(seconds) for seconds in SECONDS],
        "sizes": [status_table.gibibytes(size) for size in SIZES],
        "percents": ["?", "0%", "0%", "93%", "100%"],
    }


def test_a_log_keeps_its_lines_and_loses_control_sequences(modules: Path) -> None:
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
def test_a_long_log_line_is_processed_in_linear_time(modules: Path, letters: str) -> None:
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


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("03:00", "2026-03-29T01:00:00.000Z"),
        ("14:00", "2026-03-28T13:00:00.000Z"),
        ("2026-03-28 03:00", "2026-03-28T02:00:00.000Z"),
        ("2026-03-28T03:00Z", "2026-03-28T03:00:00.000Z"),
        ("2028-02-29 03:00", "2028-02-29T02:00:00.000Z"),
        ("2026-02-30 03:00", None),
        ("2026-02-29T03:00Z", None),
        ("2026-13-01 03:00", None),
        ("9999-12-31 23:59", None),
        ("0000-01-01 00:00", None),
        ("24:00", None),
    ],
)
def test_a_time_to_look_at_is_one_that_there_is(modules: Path, text: str, moment: str | None) -> None:
    """In the address it is the same one for a reader in another zone."""
    program = """
        import { momentOf } from "./views/events.js";
        process.env.TZ = "Europe/Berlin";
        const atMs = momentOf(given, Date.UTC(2026, 2, 29, 10));
        console.log(JSON.stringify(atMs === null ? null : new Date(atMs)));
    """
    assert in_node(modules, program, text) == moment


def test_a_zoom_of_an_address_is_one_that_there_may_be(modules: Path) -> None:
    """Of others, such as milliseconds, the page could not be drawn."""
    program = """
        import { zoomOf } from "./parts/history_plots.js";
        console.log(JSON.stringify(given.map(([from, to]) => zoomOf({ from, to }))));
    """
    given = [["1764300000", "1764343200"], ["1e15", "1e16"], ["1764300000000", "1764343200000"], ["-5", "9"]]
    assert in_node(modules, program, given) == [[1764300000, 1764343200], None, None, None]


def test_the_page_uses_the_daemons_clock(modules: Path) -> None:
    said = in_node(
        modules,
        """
        import * as clock from "./clock.js";
        const here = Date.now();
        clock.learnFrom(new Date(given.there * 1000).toUTCString(), here - 10, here + 10);
        const ahead = clock.nowMs() - Date.now();
        clock.learnFrom("nonsense", here, here);
        clock.learnFrom(null, here, here);
        clock.learnFrom(new Date(given.there * 1000 + 999).toUTCString(), here + 300, here + 320);
        console.log(JSON.stringify([clock.nowMs() / 1000, clock.nowMs() - Date.now() === ahead]));
        """,
        {"there": datetime(2031, 5, 6, tzinfo=UTC).timestamp()},
    )
    assert said[0] == pytest.approx(datetime(2031, 5, 6, tzinfo=UTC).timestamp(), abs=5)
    assert said[1] is True


ASKING = """
import { mock } from "node:test";
mock.timers.enable({ apis: ["setTimeout", "Date"] });
const kept = new Map();
globalThis.document = { baseURI: "http://daemon/" };
globalThis.sessionStorage = {
    getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text),
    removeItem: (name) => kept.delete(name),
};
globalThis.localStorage = { getItem: () => null, setItem() {}, removeItem() {} };
const asked = [];
const found = (value) => ({ ok: true, status: 200, headers: new Headers(), text: async () => JSON.stringify(value) });
const refused = (status, said = {}, headers = {}) => (
    { ok: false, status, headers: new Headers(headers), json: async () => said });
let reply; // what the daemon answers to an address, or to the stream; undefined: an empty list
const stream = (text) => ({ ok: true, status: 200, headers: new Headers(), body: new ReadableStream({
    start: (controller) => controller.enqueue(new TextEncoder().encode(text)),
}) });
globalThis.fetch = async (address, { headers, signal }) => {
    const streams = headers.Accept === "text/event-stream";
    const path = address.href.slice("http://daemon/".length);
    asked.push(streams ? "stream" : path);
    const answer = reply(path, streams, signal);
    if (answer === undefined) return streams ? refused(503) : found({ items: [], next: null });
    return answer;
};
/** Let time go by, and everything that is due happen. */
async function pass(ms) {
    for (let at = 0; at <= ms; at += 250) {
        mock.timers.tick(at === 0 ? 0 : 250);
        for (let turn = 0; turn < 5; turn += 1) await new Promise((resolve) => setImmediate(resolve));
    }
}
const { Follow, LISTS } = await import("./follow.js");
const seen = { events: [] };
const told = { current: 0, failed: [], refused: 0 };
const follow = new Follow(seen, {
    drawn() {}, current() { told.current += 1; }, failed(problem) { told.failed.push(problem.sentence); },
    refused() { told.refused += 1; },
});
const tell = (value) => console.log(JSON.stringify(value));
"""
"""A page without its picture: what is asked of a daemon that is made up, in time that is, too."""


def test_an_answer_of_another_server_is_reported_and_retried(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        let wrong = [{ hello: "from a proxy" }, null, "text", 7, { items: 7 }];
        reply = (path, streams) => (path === "v1/nodes" && !streams && wrong.length ? found(wrong.shift()) : undefined);
        follow.start();
        await pass(60_000);
        tell({ ...told, failed: told.failed.length, first: told.failed[0], nodes: seen.nodes });
        """,
        None,
    )
    assert said["failed"] == 5
    assert said["first"].startswith("Something other than the daemon answers. ")
    assert said["current"] >= 1
    assert said["nodes"] == {"items": [], "more": False}


def test_a_page_waits_also_where_a_proxy_says_to_wait_for_years(modules: Path) -> None:
    """A timer of more than 24 days would fire at once."""
    requests = in_node(
        modules,
        ASKING
        + """
        reply = () => refused(429, {}, { "Retry-After": "1000000000" });
        follow.start();
        await pass(60_000);
        tell(asked.length);
        """,
        None,
    )
    assert requests <= 20, "one round, and one more of the stream"


def test_a_first_answer_that_takes_long_is_waited_for(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        let arrive;
        const slow = new Promise((resolve) => { arrive = resolve; });
        reply = (path, streams) => (streams ? stream("id: 0\\n\\n") : path.startsWith("v1/nodes") ? slow : undefined);
        follow.start();
        for (let second = 0; second < 15; second += 1) {
            await pass(1000);
            follow.look();
        }
        const before = told.current;
        arrive(found({ items: [], next: null }));
        await pass(1000);
        tell([before, told.current, told.failed]);
        """,
        None,
    )
    assert said == [0, 1, []]


def test_an_error_of_the_page_itself_is_reported_and_retried(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        console.error = () => {};
        let faults = 2;
        reply = (path) => (path === "v1/gpus" && faults-- > 0
            ? { ...found(), headers: { get() { throw new TypeError("no such thing"); } } } : undefined);
        follow.start();
        await pass(20_000);
        tell(told);
        """,
        None,
    )
    assert said["failed"] == ["The answer cannot be read: no such thing."] * 2
    assert said["current"] >= 1


@pytest.mark.parametrize("said", [None, [], "text", {"detail": [{"loc": ["query"]}], "remedy": 7}])
def test_a_problem_may_have_any_content(modules: Path, said: Any) -> None:
    sentence = in_node(
        modules,
        'import { Problem } from "./api.js"; console.log(JSON.stringify(new Problem(502, given).sentence));',
        said,
    )
    assert sentence == "The daemon answered 502."


@pytest.mark.parametrize("status", [429, 503])
def test_a_long_list_arrives_although_every_other_request_is_refused(modules: Path, status: int) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        let turn = 0;
        reply = (path, streams) => {
            if (streams) return refused(503, {}, { "Retry-After": "3600" });
            if (turn++ % 2) return refused(given, {}, { "Retry-After": "1" });
            if (!path.startsWith("v1/leases?state=queued")) return undefined;
            const page = Number(new URLSearchParams(path.split("?")[1]).get("cursor") ?? 0);
            return found({ items: [page], next: page < 5 ? String(page + 1) : null });
        };
        follow.start();
        await pass(30_000);
        tell({ lists: LISTS.every((name) => name in seen), queued: seen.queued, current: told.current,
            again: asked.filter((path) => path.includes("cursor=2")).length });
        """,
        status,
    )
    assert said == {"lists": True, "queued": {"items": [0, 1, 2, 3, 4, 5], "more": False}, "current": 1, "again": 2}


def test_of_thousands_of_jobs_only_those_drawn_are_fetched(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        reply = (path, streams) => {
            if (streams || !path.startsWith("v1/jobs")) return undefined;
            const limit = Number(new URLSearchParams(path.split("?")[1]).get("limit"));
            return found({ items: Array(limit).fill({}), next: "on" });
        };
        follow.start();
        await pass(0);
        const jobs = asked.filter((path) => path.startsWith("v1/jobs"));
        tell({
            most: Math.max(...jobs.map((path) => Number(new URLSearchParams(path.split("?")[1]).get("limit")))),
            sizes: ["waiting", "working", "over"].map((name) => [seen[name].items.length, seen[name].more]),
        });
        """,
        None,
    )
    assert said == {"most": 50, "sizes": [[200, True], [200, True], [50, True]]}


def test_a_stream_that_was_refused_once_is_opened_again(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        let refusals = 1;
        reply = (path, streams) => {
            if (streams) return refusals-- > 0 ? refused(401) : stream("id: 3\\n\\n");
            return path.startsWith("v1/events") ? found({ items: [], last_seq: 3, pruned_seq: 0 }) : undefined;
        };
        follow.start();
        await pass(5000);
        tell({ streams: asked.filter((path) => path === "stream").length, at: follow.lastId, refused: told.refused });
        """,
        None,
    )
    assert said == {"streams": 2, "at": "3", "refused": 0}


def test_nothing_is_requested_after_a_401(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        reply = () => refused(401);
        follow.start();
        await pass(0);
        const first = asked.length;
        await pass(30_000);
        const before = asked.length === first;
        reply = () => undefined;
        follow.start();
        await pass(1000);
        tell({ before, refused: told.refused, after: asked.length > first, current: told.current > 0 });
        """,
        None,
    )
    assert said == {"before": True, "refused": 1, "after": True, "current": True}


def test_another_token_is_tried_at_once(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        reply = () => refused(403, {}, { "Retry-After": "60" });
        follow.start();
        await pass(3000);
        const before = told.current;
        reply = () => undefined;
        follow.restart();
        await pass(0);
        tell([before, told.current]);
        """,
        None,
    )
    assert said == [0, 1]


def test_events_come_in_pages_if_there_is_no_stream(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        let last = 250;
        let refusals = 2;
        reply = (path, streams) => {
            if (streams) return refused(503, {}, { "Retry-After": "10" });
            if (!path.startsWith("v1/events")) return undefined;
            if (refusals-- > 0) return refused(503);
            const asks = new URLSearchParams(path.split("?")[1]);
            const [after, limit] = [Math.max(200, Number(asks.get("after"))), Number(asks.get("limit"))];
            const items = Array.from({ length: Math.min(limit, last - after) }, (_, at) => ({ seq: after + 1 + at }));
            return found({ items, last_seq: last, pruned_seq: 200 });
        };
        follow.start();
        await pass(5000);
        const first = seen.events.map((event) => event.seq);
        last = 253;
        await pass(20_000);
        tell([first, seen.events.map((event) => event.seq)]);
        """,
        None,
    )
    assert said == [list(range(250, 200, -1)), list(range(253, 200, -1))]


@pytest.mark.parametrize(
    ("lease", "gpu", "most"),
    [
        ({"expires_at": None}, {"state": "leased"}, 1),
        ({"expires_at": "1970-01-01T01:00:00Z"}, {"state": "leased"}, 1),
        ({"expires_at": "1970-01-01T00:00:30Z"}, {"state": "leased"}, 7),  # it may have been renewed
        ({"expires_at": None}, {"state": "unknown"}, 7),  # its node may be silent
    ],
)
def test_with_a_stream_only_what_may_have_changed_is_requested(
    modules: Path, lease: dict[str, Any], gpu: dict[str, Any], most: int
) -> None:
    """All GPUs each 3 s. Nodes and leases once a minute, or each 9 s if something may be new that is no event."""
    said = in_node(
        modules,
        ASKING
        + """
        const newlines = String.fromCharCode(10, 10);
        const lists = {
            "v1/gpus": [{ node: "n1", ...given.gpu }],
            "v1/nodes": [{ name: "n1", state: "ready" }],
            "v1/leases?state=active&limit=1000": [given.lease],
        };
        reply = (path, streams) => {
            if (streams) return stream("id: 7" + newlines);
            const items = lists[path.replace("http://daemon/", "")];
            return items ? found({ items, next: null }) : undefined;
        };
        follow.start();
        for (let second = 0; second < 58; second += 1) {
            await pass(1000);
            follow.look();
        }
        const count = (wanted) => asked.filter((path) => path.startsWith(wanted)).length;
        tell([count("v1/gpus"), count("v1/nodes"), count("v1/leases?state=active")]);
        """,
        {"lease": lease, "gpu": gpu},
    )
    gpus, nodes, leases = said
    assert gpus >= 15
    assert nodes == leases <= most + 1  # all once more as the stream begins
    assert nodes >= most


def test_a_clock_that_is_set_back_stops_no_requests(modules: Path) -> None:
    """A day back: the page asked again when the clock was where it had been, a day later."""
    said = in_node(
        modules,
        ASKING
        + """
        const newlines = String.fromCharCode(10, 10);
        reply = (path, streams) => (streams ? stream("id: 7" + newlines) : undefined);
        const watch = async (seconds) => {
            const before = asked.length;
            for (let second = 0; second < seconds; second += 1) {
                await pass(1000);
                follow.look();
            }
            return asked.slice(before).filter((path) => path.startsWith("v1/gpus")).length;
        };
        const now = Date.now;
        Date.now = () => now() + 86_400_000;
        follow.start();
        const counts = [await watch(60)];
        Date.now = now;
        counts.push(await watch(60));
        tell(counts);
        """,
        None,
    )
    before, after = said
    assert after >= before - 1 > 0


def test_requests_in_flight_end_with_the_page(modules: Path) -> None:
    said = in_node(
        modules,
        ASKING
        + """
        const ended = [];
        reply = (path, streams, signal) => new Promise((resolve, reject) => {
            signal.addEventListener("abort", () => { ended.push(streams ? "stream" : path); reject(signal.reason); });
        });
        follow.start();
        await pass(0);
        follow.stop();
        await pass(0);
        const stopped = [...ended];
        reply = () => undefined;
        follow.lastId = "7"; // as the former was shown it
        follow.restart();
        await pass(0);
        tell({ stopped, lastId: follow.lastId, failed: told.failed, current: told.current });
        """,
        None,
    )
    assert {"stream", "v1/gpus", "v1/nodes"} <= set(said["stopped"])
    assert (said["lastId"], said["failed"], said["current"]) == (None, [], 1)


def schemes() -> list[dict[str, str]]:
    """The colours of the style sheet, light and dark, by name."""
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", (FOLDER / "page.css").read_text())
    return [{name: pair[at] for name, *pair in found} for at in (0, 1)]


@pytest.mark.parametrize("colours", schemes(), ids=["light", "dark"])
def test_text_has_enough_contrast(colours: dict[str, str]) -> None:
    """Level AA of WCAG 2.2: 4.5 to 1 for text, 3 to 1 for marks."""
    for back in ("page", "sheet"):
        for text in ("text", "quiet", "link", "red", "amber", "orange"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
        for mark in ("green", "grey", *(f"{kind}-{number}" for kind in ("hue", "line") for number in range(8))):
            assert contrast(colours[mark], colours[back]) >= 3.0, (mark, back)
    assert contrast(colours["alarm-text"], colours["alarm-back"]) >= 4.5
    assert all(contrast(colours[text], colours["danger-back"]) >= 4.5 for text in ("text", "quiet", "red"))
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
