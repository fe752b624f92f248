"""The shell and what fits a screen: addresses, search, problems, themes, and the criteria of a page for everyone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, daemon
from tests.dashboard.conftest import Watched, watching, whole_answer
from tests.dashboard.test_modules import in_node, modules
from tests.dashboard.test_page import GIB, ask, card, submit
from tests.http_as_user import call

__all__ = ["modules"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AXE = Path(__file__).parents[2] / ".venv/page-tools/node_modules/axe-core/axe.min.js"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
COLOUR = """one => {
    const filters = [];
    for (let place = one; place; place = place.parentElement) filters.push(getComputedStyle(place).filter);
    return [getComputedStyle(one).color, ...filters].join();
}"""
DRAWS_IN_COLOUR = """() => {
    const { width, height } = document.querySelector("canvas");
    const { data } = document.querySelector("canvas").getContext("2d").getImageData(0, 0, width, height);
    for (let at = 0; at < data.length; at += 4) {
        const parts = data.slice(at, at + 3);
        if (data[at + 3] === 255 && Math.max(...parts) - Math.min(...parts) > 60) return true;
    }
    return false;
}"""
HISTORY = [None] * 10 + [0.0] * 20 + [0.5, 1.0] * 15
STRANGER = {"pid": 414242, "memory_bytes": 3 * GIB, "user": "mallory", "command": "python mine.py"}


def with_history(page: Page, hardware: Hardware) -> None:
    """Let the daemon have a history of GPU 0."""

    def answer(route: Route) -> None:
        gpu = {"uuid": hardware.uuid(0), "node": "n1", "index": 0, "name": "x", "utilization_ratio": HISTORY}
        route.fulfill(
            json={"from_at": "2026-01-01T00:00:00Z", "to_at": "2026-01-01T01:00:00Z", "bucket_s": 60, "gpus": [gpu]}
        )

    page.route("**/v1/gpus/history*", answer)


def is_inside(page: Page, selector: str) -> bool:
    """True if all of these are on the screen without scrolling."""
    return bool(
        page.eval_on_selector_all(
            selector,
            "all => all.length > 0 && all.every(one => {"
            " const box = one.getBoundingClientRect();"
            " return box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; })",
        )
    )


def test_views_have_addresses_and_back_works(watched: Watched, running: DaemonProcess, hardware: Hardware) -> None:
    """S1: each view opens by its address and after a reload; the bar says which it is; Back goes back."""
    waits = [ask(running, count=4), ask(running, count=1)][1]
    job = submit(running, "true", name="tiny")
    places = {
        "now": "Now", "queue": "Queue", "jobs": "Jobs", "timeline": "Timeline", "usage": "Usage",
        "events": "Events", "wall": "Wall", f"jobs/{job['id']}": "tiny",
        f"leases/{waits['id']}": waits["id"], f"gpus/{hardware.uuid(2)}": "GPU 2 of n1",
    }  # fmt: skip
    page = watched.open()
    for place, heading in places.items():
        page.goto(f"{running.url}/#/{place}")
        if "/" in place or place == "timeline":
            page.reload()  # it is the same for the other ones, and each is a second of CPU
        expect(page.get_by_role("heading", level=1)).to_contain_text(heading)
    page.goto(f"{running.url}/#/now")
    for view in ("Timeline", "Queue", "Usage", "Jobs", "Events"):
        page.get_by_role("link", name=view).first.click()
        expect(page.locator("nav [aria-current=page]")).to_contain_text(view)
        expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.go_back()
    expect(page.locator("nav [aria-current=page]")).to_contain_text("Jobs")
    watched.was_good()


def test_a_range_that_there_is_not_is_the_usual_one(watched: Watched, hardware: Hardware) -> None:
    for view, usual in (("timeline", "24h"), ("usage", "week"), (f"gpus/{hardware.uuid(0)}", "1h")):
        page = watched.open(f"#/{view}?range=constructor")
        expect(page.get_by_role("group", name="Time").get_by_role("button", pressed=True)).to_have_text(usual)
    watched.was_good()


def test_back_goes_to_where_one_was_in_a_list(browser: Browser, running: DaemonProcess) -> None:
    for _ in range(12):
        ask(running, count=4, ttl_s=6000)
    with watching(browser, running, height=300) as watched:
        page = watched.open("#/queue")
        page.locator("#queue tbody tr").last.get_by_role("link").first.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("lease-")
        page.wait_for_function("() => scrollY === 0")
        page.go_back()
        expect(page.get_by_role("heading", level=1)).to_have_text("Queue")
        page.wait_for_function("() => scrollY > 100 && scrollY === history.state.scrolled")
        watched.was_good()


def test_search_leaves_only_what_matches(watched: Watched, running: DaemonProcess) -> None:
    """S2: `/` focuses it, it works in each view, and it is in the address."""
    ask(running, count=1, label="chloe: notebook")
    ask(running, count=1, label="bram: sdxl")
    for name in ("chloe: eval", "bram: eval"):
        ask(running, count=4, label=name)
    page = watched.open()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Search")).to_be_focused()
    page.keyboard.type("chloe")

    expect(page.locator("[data-gpu]")).to_have_count(1)
    expect(card(page, 0)).to_contain_text("chloe: notebook")
    expect(page).to_have_url(re.compile(r"#/now\?q=chloe$"))
    page.get_by_role("link", name="Queue").first.click()
    expect(page.locator("#queue tbody > tr")).to_have_count(1)
    page.reload()
    expect(page.locator("#queue tbody > tr")).to_have_count(1)
    expect(page.get_by_role("searchbox", name="Search")).to_have_value("chloe")
    page.get_by_role("searchbox", name="Search").fill("dai")
    page.get_by_role("link", name="Now").first.click()
    expect(page.get_by_text("No request in the queue matches.")).to_be_visible()
    expect(page.get_by_text("No event matches.")).to_be_visible()
    watched.was_good()


def test_problems_are_counted_in_the_bar(watched: Watched, hardware: Hardware) -> None:
    """S3: none, no bar."""
    page = watched.open()
    expect(page.locator(".problems")).to_have_count(0)
    hardware.show({"health": "xid:79"}, {"processes": [STRANGER]}, {}, {"health": "lost"})

    expect(page.locator(".problem-count")).to_have_text("3 problems")
    expect(page.locator(".problems li")).to_have_count(2)
    page.get_by_role("button", name="Show all 3").click()
    for text in ("GPU 0 unhealthy: xid:79", "pid 414242 of mallory", "GPU 3 unhealthy"):
        expect(page.locator(".problems")).to_contain_text(text)
    hardware.show({}, {}, {}, {})
    expect(page.locator(".problems")).to_have_count(0)
    watched.was_good()


def changed(page: Page, path: str, **fields: Any) -> None:
    """Let the daemon answer with other fields in the first two items of a list."""

    def answer(route: Route) -> None:
        found = whole_answer(route)
        page_of_items = found.json()
        for item in page_of_items["items"][:2]:
            item.update(fields)
        route.fulfill(response=found, body=json.dumps(page_of_items))

    page.route(path, answer)


def test_free_is_only_what_anyone_may_get(watched: Watched) -> None:
    """S4: GPUs that are kept for a waiting request are held."""
    changed(watched.page, "**/v1/gpus", reason="Held for lease-1 (user ann), which waits")
    page = watched.open()

    expect(page.locator('[data-total="held"] b')).to_have_text("2")
    expect(page.locator('[data-total="free"] b')).to_have_text("2")
    expect(card(page, 0)).to_contain_text("held")
    expect(card(page, 0)).to_contain_text("Held for lease-1 (user ann)")
    expect(page).to_have_title(re.compile("^2 of 4 free"))
    watched.was_good()


@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing(browser: Browser, running: DaemonProcess, hardware: Hardware, width: int) -> None:
    """S5: in every view, light and dark, with every state that simulated hardware can have."""
    hardware.show({}, {"health": "xid:79"}, {"processes": [STRANGER]}, {"compute_mode": "prohibited"})
    ask(running, count=1, label="ada")
    waits = ask(running, count=4, label="bob")
    job = submit(running, "sh", "-c", "echo said; exit 3", name="broken")
    running.call("PUT", "/v1/limits/user/root", {"max_gpus": 900})
    with watching(browser, running, width=width, color_scheme="light", bypass_csp=True) as watched:
        with_history(watched.page, hardware)
        page = watched.open()
        page.evaluate(AXE.read_text())
        uuid = hardware.uuid(0)
        for view in (
            "now",
            "timeline",
            "usage",
            "queue",
            "jobs",
            "events",
            "wall",
            f"jobs/{job['id']}",
            f"leases/{waits['id']}",
            f"gpus/{uuid}",
        ):
            page.evaluate("view => { location.hash = `#/${view}` }", view)
            expect(page.locator(f"main.view-{view.split('/')[0]} h1")).to_have_count(1)
            expect(page.get_by_text("Loading...")).to_have_count(0)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
                seen = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
                assert seen == [], (view, scheme)
    running.call("DELETE", "/v1/limits/user/root")


def test_the_theme_is_chosen_and_kept(browser: Browser, running: DaemonProcess) -> None:
    """S8: light, dark, or as the system has it."""
    background = "getComputedStyle(document.body).backgroundColor"
    with watching(browser, running, color_scheme="light") as watched:
        page = watched.open()
        light = page.evaluate(background)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(background)
        assert light != dark
        page.get_by_role("button", name="Theme: auto").click()
        assert page.evaluate(background) == light
        page.reload()
        page.get_by_role("button", name="Theme: light").click()
        page.get_by_role("button", name="Theme: dark").wait_for()
        page.emulate_media(color_scheme="light")
        page.reload()
        page.wait_for_selector("body[data-drawn]")
        assert page.evaluate(background) == dark
        page.emulate_media(media="print")  # paper is white, and browsers print no backgrounds
        assert page.evaluate(background) == light


def test_high_contrast_shows_what_is_chosen_and_what_patterns_mean(browser: Browser, running: DaemonProcess) -> None:
    """The system's colours replace those of the page: what only a colour said is not seen."""
    style = "(one, name) => getComputedStyle(one)[name]"
    with watching(browser, running, forced_colors="active") as watched:
        page = watched.open("#/timeline")
        here, other = (page.get_by_role("link", name=name).first for name in ("Timeline", "Queue"))
        assert here.evaluate(style, "borderBottomColor") != other.evaluate(style, "borderBottomColor")
        day, week = (page.get_by_role("button", name=name, exact=True) for name in ("24h", "7d"))
        assert day.evaluate(style, "backgroundColor") != week.evaluate(style, "backgroundColor")
        page.locator(".band").first.wait_for()
        patterns = page.locator(".band").evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundImage)")
        assert "none" not in patterns
        assert len(set(patterns)) == len(patterns) > 3
        page.wait_for_function(DRAWS_IN_COLOUR)
        ask(running, count=1, ttl_s=6000)
        page.goto(f"{running.url}/#/usage")
        held = page.locator(".usage-bar .held").first
        held.wait_for(state="attached")
        assert held.evaluate(style, "forcedColorAdjust") == "none"
        watched.was_good()


def test_the_windows_of_a_browser_share_one_stream(browser: Browser, running: DaemonProcess) -> None:
    """S9: eight of them are live, and the next one goes on when the one with the stream closes."""
    with watching(browser, running) as watched:
        context = watched.page.context
        streams: list[str] = []
        context.on("request", lambda asked: streams.append(asked.url) if asked.url.endswith("/v1/events") else None)
        pages = [watched.page, *(context.new_page() for _ in range(7))]
        for page in pages:
            page.goto(running.url)
        for page in pages:
            page.wait_for_selector("body[data-drawn]")
        assert len(streams) == 1
        ask(running, count=1, label="for all")
        for page in pages:
            expect(card(page, 0)).to_contain_text("for all")
        pages[0].close()
        ask(running, count=1, label="for the rest")
        for page in pages[1:]:
            expect(card(page, 1)).to_contain_text("for the rest")
        assert len(streams) == 2


def test_stale_data_do_not_count_down(watched: Watched, running: DaemonProcess, hardware: Hardware) -> None:
    """S10: nor does an alarm lose its colour; the tab says so."""
    ask(running, count=1, ttl_s=3000)
    hardware.show({}, {}, {}, {"health": "xid:79"})
    page = watched.open()
    alarm = page.locator(".card .state-unhealthy")
    expect(alarm).to_be_visible()
    colour = alarm.evaluate(COLOUR)
    until = card(page, 0).locator(".until")
    expect(until).to_have_text(re.compile("^in "))
    running.kill()

    expect(page).to_have_title(re.compile("^! 2 of 4 free"))
    expect(page.get_by_role("button", name="Retry now")).to_be_visible()
    assert alarm.evaluate(COLOUR) == colour
    before = until.inner_text()
    page.wait_for_function("start => performance.now() > start + 2500", arg=page.evaluate("performance.now()"))
    assert until.inner_text() == before


def eight(hardware: Hardware) -> None:
    """GPUs in different states; two of them with more processes than a card could show."""
    many = [{"pid": 4000 + number, "memory_bytes": GIB, "user": "mallory"} for number in range(12)]
    hardware.show(
        {}, {"processes": many}, {"health": "xid:79"}, {"compute_mode": "prohibited"}, {}, {}, {}, {"processes": many}
    )


def test_at_400_percent_all_views_are_in_the_bar_and_the_content_scrolls(
    browser: Browser, running: DaemonProcess
) -> None:
    with watching(browser, running, width=320, height=256) as watched:
        page = watched.open()
        assert is_inside(page, "nav a")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(page.locator("header")).not_to_be_in_viewport()
        watched.was_good()


def test_a_laptop_shows_8_gpus_and_the_queue_without_scrolling(
    browser: Browser, fresh: tuple[DaemonProcess, Hardware]
) -> None:
    """N1, N2: whatever the number of processes; all cards have one height."""
    running, hardware = fresh
    eight(hardware)
    with watching(browser, running) as watched:
        page = watched.open()
        expect(page.locator("[data-gpu]")).to_have_count(8)
        ask(running, count=2, label="l" * 200)
        for number in range(7):
            ask(running, count=5, label=f"trial {number}")
        expect(page.locator("nav")).to_contain_text("Queue 7")

        expect(page.locator(".now-side tbody tr").nth(4)).to_be_visible()
        assert is_inside(page, "[data-gpu]")
        assert is_inside(page, ".now-side section:first-child tbody tr:nth-child(-n+5)")
        heights = page.eval_on_selector_all("[data-gpu]", "all => all.map(one => one.getBoundingClientRect().height)")
        assert len(set(heights)) == 1
        watched.was_good()


def test_a_sparkline_is_the_last_hour_and_a_gap_is_no_zero(watched: Watched, hardware: Hardware) -> None:
    """N3: its points are those of the daemon; a time of which nothing is known is not drawn."""
    with_history(watched.page, hardware)
    page = watched.open()
    spark = card(page, 0).locator("svg.spark")
    expect(spark).to_have_attribute("data-values", re.compile(r"\d"))
    drawn = spark.get_attribute("data-values")

    assert drawn is not None
    assert [None if text == "" else float(text) for text in drawn.split(" ")] == HISTORY
    line = spark.locator(".line").get_attribute("d")
    assert line is not None
    assert line.startswith("M10 31.00")  # the eleventh point, which is 0
    assert spark.get_attribute("viewBox") == "0 0 59 32"
    watched.was_good()


def test_a_sparkline_is_not_made_again_each_second(watched: Watched, hardware: Hardware) -> None:
    """A wall of hundreds of GPUs is drawn every second; their history comes once a minute."""
    with_history(watched.page, hardware)
    page = watched.open("#/wall")
    expect(page.locator("svg.spark")).to_have_count(1)
    made = page.evaluate("""async () => {
        const toFixed = Number.prototype.toFixed;
        let count = 0;
        Number.prototype.toFixed = function (...digits) { count += 1; return toFixed.apply(this, digits); };
        for (let turn = 0; turn < 3; turn += 1) {
            dispatchEvent(new HashChangeEvent("hashchange"));
            for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
        }
        Number.prototype.toFixed = toFixed;
        return count;
    }""")
    assert made == 0
    watched.was_good()


def test_a_gpu_without_work_says_for_how_long(browser: Browser, running: DaemonProcess) -> None:
    """N5: after 10 minutes in amber, no matter who took it and how."""
    ask(running, count=1, label="asleep", ttl_s=36_000)
    with watching(browser, running) as watched:
        page = watched.page
        page.clock.install()
        watched.open()
        expect(card(page, 0)).to_contain_text("unused")

        def later(route: Route) -> None:
            answer = whole_answer(route)
            items = answer.json()
            items["items"][0]["last_busy_at"] = "2026-01-01T00:00:00Z"
            route.fulfill(response=answer, body=json.dumps(items), headers={"Date": "Thu, 01 Jan 2026 00:11:00 GMT"})

        page.route("**/v1/gpus", later)
        page.clock.run_for(4000)
        expect(card(page, 0).locator(".state-idle")).to_have_text(re.compile(r"idle \d+"))
        expect(card(page, 0).locator(".use.low")).to_be_visible()


@pytest.mark.parametrize(
    ("ends_at", "shown"), [(None, "while pid 4242 runs"), ("2126-01-01T00:00:00Z", re.compile(r"^at most \d+d"))]
)
def test_a_lease_of_a_watched_process_has_no_countdown_unless_its_time_is_declared(
    watched: Watched, running: DaemonProcess, ends_at: str | None, shown: str | re.Pattern[str]
) -> None:
    """N6: it is renewed while the process lives. Both together would leave no room for the label."""
    ask(running, count=1, label="run")
    holder = {"user": "ada", "host": "h", "owner_pid": 4242, "label": "run"}
    changed(watched.page, "**/v1/leases?state=active*", liveness="process", holder=holder, ends_at=ends_at)
    page = watched.open()
    expect(card(page, 0).locator(".until")).to_have_text(shown)


@pytest.mark.budget(120)
def test_a_wall_shows_64_gpus_without_a_scrollbar(browser: Browser, tmp_path: Path) -> None:
    """N1, N9: tiles of at least 200 by 90 pixels, with digits of at least 28, in 1920 by 1080."""
    place = tmp_path / "64.json"
    gpus = [{"uuid": f"GPU-{number:08d}-0000-0000-0000-000000000000", "utilization_ratio": 0.9} for number in range(64)]
    place.write_text(json.dumps({"gpus": gpus}))
    with (
        daemon(tmp_path, "--simulate", str(place)) as running,
        watching(browser, running, width=1920, height=1080) as watched,
    ):
        ask(running, count=40, label="ada: pretrain")
        page = watched.open("#/wall")
        expect(page.locator(".tile")).to_have_count(64)
        expect(page.locator(".tile .who").first).to_have_text("root")
        assert is_inside(page, ".tile")
        size: list[Any] = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
        assert size == [1080, 1920]
        boxes = page.eval_on_selector_all(
            ".tile",
            "all => all.map(one => [one.offsetWidth, one.offsetHeight,"
            " parseFloat(getComputedStyle(one.querySelector('.use')).fontSize)])",
        )
        assert all(width >= 200 and height >= 90 and digits >= 28 for width, height, digits in boxes)
        watched.was_good()


def test_a_tile_says_which_gpu_of_which_node_it_is(watched: Watched) -> None:
    """Nodes of a cluster have long names that begin alike: no tile had a number, and all were called the same."""
    changed(watched.page, "**/v1/gpus", node="gpu-node-of-the-lab-07.cluster.example.org")
    page = watched.open("#/wall")
    heads = page.locator(".tile h2")
    expect(heads.filter(has_text="0…-the-lab-07")).to_have_count(1)
    expect(heads.filter(has_text="1…-the-lab-07")).to_have_count(1)
    expect(heads.filter(has_text="2n1")).to_have_count(1)
    numbers = "all => all.map(one => one.getBoundingClientRect().left)"
    assert heads.locator("span").evaluate_all(numbers) == heads.locator("a").evaluate_all(numbers)  # never cut off
    watched.was_good()


def test_a_wall_of_eight_gpus_shows_a_whole_name(browser: Browser, tmp_path: Path) -> None:
    """N9: a tile that is high is not always wide."""
    with daemon(tmp_path, "--simulate", "8") as running, watching(browser, running) as watched:
        holder = {"user": "katharina", "host": "h", "owner_pid": 4242, "label": "run"}
        changed(watched.page, "**/v1/gpus", state="leased", activity="active", utilization_ratio=1.0, holder=holder)
        page = watched.open("#/wall")
        name = page.locator(".tile .who").first
        expect(name).to_have_text("katharina")
        assert name.evaluate("one => one.scrollWidth <= one.clientWidth"), "it is cut"
        watched.was_good()


def test_a_viewers_token_is_remembered_on_request(browser: Browser, tmp_path: Path) -> None:
    """N9: a wall is live again after its browser was started again; a token that may do more is not kept."""
    with daemon(tmp_path, "--simulate", "2", "--behind-proxy") as closed:
        for role, kept in (("viewer", True), ("user", False)):
            bearer = call(closed.socket, "POST", "/v1/tokens", {"user": "ann", "role": role}).json["bearer"]
            with watching(browser, closed) as watched:
                page = watched.page
                page.goto(closed.url)
                page.get_by_label("Token").fill(bearer)
                page.get_by_role("checkbox").check()
                page.get_by_role("button", name="Sign in").click()
                page.wait_for_selector("body[data-drawn]")
                page.wait_for_selector(".me")
                page.wait_for_function("kept => localStorage.length === kept", arg=int(kept))
                again = page.context.new_page()
                again.goto(closed.url)
                expect(again.locator("[data-gpu]")).to_have_count(2 if kept else 0)
                if not kept:
                    expect(again.get_by_label("Token")).to_be_focused()


def test_events_around_a_time_are_one_request(watched: Watched, running: DaemonProcess) -> None:
    """E1, E3, E4: "03:00" shows half an hour before and after; problems are marked, ids are links."""
    failed = submit(running, "sh", "-c", "exit 3", name="faulty")
    running.wait_job(failed["id"])
    submitted, ended = (re.compile(f"job {what}.*faulty") for what in ("submitted", "ended"))
    asked: list[str] = []
    page = watched.page
    page.on("request", lambda one: asked.append(one.url) if "from=" in one.url else None)
    watched.open("#/events")
    now = page.evaluate("new Date().toTimeString().slice(0, 5)")
    page.get_by_label("around").fill(now)
    page.wait_for_function("start => performance.now() > start + 1500", arg=page.evaluate("performance.now()"))
    page.keyboard.press("Enter")

    expect(page.locator("#events .is-problem").filter(has_text=ended)).to_have_count(1)
    expect(page.locator("#events li").filter(has_text=submitted)).to_have_count(1)
    page.get_by_role("group", name="Kind").get_by_role("button", name="problems").click()
    expect(page.locator("#events li").filter(has_text=submitted)).to_have_count(0)
    today = page.evaluate("new Date().toISOString().slice(0, 10)")
    expect(page).to_have_url(re.compile(f"#.*at={today}T.*Z"))  # it means the same tomorrow, and in another zone
    expect(page.get_by_label("around")).to_have_value(re.compile(f"{now}$"))
    page.reload()
    expect(page.locator("#events .is-problem").filter(has_text=ended)).to_have_count(1)
    page.locator("#events").get_by_role("link", name="faulty").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("faulty")
    assert len(asked) == 2  # one, and one after the reload
    page.goto(f"{running.url}/#/events?at=26:99")
    expect(page.locator(".problem")).to_contain_text("is no time: write 03:00")
    watched.was_good()


def test_events_of_a_busy_hour_say_that_there_were_more(watched: Watched) -> None:
    """A page of events is a thousand: that the others did not happen would be wrong."""
    answer = {"items": [], "next": "4711", "pruned_seq": 0, "last_seq": 9000}
    watched.page.route("**/v1/events?from=*", lambda route: route.fulfill(json=answer))
    page = watched.open("#/events?at=03:00")
    expect(page.locator("main .facts")).to_have_text("half an hour before and after, only the last 1000 events")


def test_events_of_one_cause_are_a_group(modules: Path) -> None:
    """E2: below each other where the first of them is."""
    given = [(cause, "2026-01-01T00:09:00Z") for cause in ("a", "b", "a", None, "b", None, "timer")]
    given.append(("timer", "2026-01-01T00:00:00Z"))
    program = """
        import { groupedByCause } from "./model.js";
        const events = given.map(([cause, at], seq) => ({ seq, cause, at }));
        console.log(JSON.stringify(groupedByCause(events).map(({ seq, follows }) => [seq, follows])));
    """
    assert in_node(modules, program, given) == [
        [0, False], [2, True], [1, False], [4, True], [3, False], [5, False], [6, False], [7, False],
    ]  # fmt: skip
