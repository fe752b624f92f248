"""How soon, how calmly, and how largely the page shows what happens."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.daemon import DaemonProcess, daemon
from tests.dashboard.conftest import Watched, watching, whole_answer
from tests.dashboard.test_page import ask, card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = """least => [...document.querySelectorAll("button, input, select, nav a, .brand")]
    .filter((one) => one.getClientRects().length && !["checkbox", "radio"].includes(one.type))
    .map((one) => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
    .filter(([, box]) => box.height < least || box.width < Math.min(least, 24))
    .map(([text, box]) => `${text} ${box.width} x ${box.height}`)"""
TABS, GRANTS_EACH = 2, 10
GRANTS = TABS * GRANTS_EACH
TAKES_LEASES = """grants => {
    const page = () => document.querySelector('[data-gpu="0"]')?.textContent ?? "";
    const until = (reached) => new Promise((resolve) => {
        const look = () => reached() && (watcher.disconnect(), resolve(performance.now()));
        const watcher = new MutationObserver(look);
        watcher.observe(document.body, { subtree: true, childList: true, characterData: true });
        look();
    });
    const post = async (path, body) => {
        const answer = await fetch(path, {
            method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
        if (!answer.ok) throw Error(`${path}: ${await answer.text()}`);
        return answer.json();
    };
    window.took = [];
    window.failed = null;
    (async () => {
        for (let number = 0; number < grants; number++) {
            await new Promise((resolve) => setTimeout(resolve, 1000));
            const begun = performance.now();
            const shown = until(() => page().includes(`round ${number}`));
            const lease = await post("v1/leases?wait_s=60", { devices: [0], label: `round ${number}` });
            window.took.push((await shown) - begun);
            await post(`v1/leases/${lease.id}/release`, { token: lease.token });
            await until(() => document.querySelector("#totals").textContent.includes("4 free"));
        }
    })().catch((error) => { window.failed = String(error); });
}"""


@pytest.mark.alone
@pytest.mark.budget(60)
def test_a_grant_is_on_its_card_at_once(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """N4: within half a second, 20 of 20. The page itself asks, so that both times are of one clock.

    They come a second apart: between rounds that follow each other more closely the page pauses, some time or other.
    Most of that is waiting, so two pages do it side by side, each of a daemon of its own.
    """
    with ExitStack() as stack:
        tabs = []
        for _ in range(TABS):
            running = stack.enter_context(daemon(tmp_path_factory.mktemp("daemon")))
            tabs.append(stack.enter_context(watching(browser, running)))
        for tab in tabs:
            tab.open().evaluate(TAKES_LEASES, GRANTS_EACH)
        for tab in tabs:
            ended = "grants => window.failed !== null || window.took.length === grants"
            tab.page.wait_for_function(ended, arg=GRANTS_EACH, timeout=240_000, polling=200)
            assert tab.page.evaluate("window.failed") is None
        took = sorted(taken for tab in tabs for taken in tab.page.evaluate("window.took"))
        print(f"grant to card: median {took[GRANTS // 2]:.0f} ms, at most {took[-1]:.0f} ms")
        assert took[GRANTS // 2] < 1000  # 300 ms, and what a busy machine adds
        assert took[-1] < 4000  # 500 ms; less than until the page asks by itself
        for tab in tabs:
            tab.was_good()


@pytest.mark.alone
@pytest.mark.budget(120)
def test_a_cold_page_shows_64_gpus_soon(browser: Browser, tmp_path: Path) -> None:
    """N7, P3: all cards within a second and a half; on a phone the nodes are folded, and fill at most three screens."""
    place = tmp_path / "64.json"
    gpus = [{"uuid": f"GPU-{number:08d}-0000-0000-0000-000000000000", "utilization_ratio": 0.9} for number in range(64)]
    place.write_text(json.dumps({"gpus": gpus}))
    with daemon(tmp_path, "--simulate", str(place)) as running:
        ask(running, count=40, label="pretrain")
        with watching(browser, running) as watched:
            page = watched.open()
            drawn = page.evaluate("performance.now()")
            expect(page.locator("[data-gpu]")).to_have_count(64)
            painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            print(f"cold: first paint {painted:.0f} ms, cards {drawn:.0f} ms")
            assert drawn < 10_000  # 1.5 s; and what a busy machine adds
            watched.was_good()
        with watching(browser, running, width=390, height=844) as watched:

            def eight_nodes(route: Route) -> None:
                answer = whole_answer(route)
                body = answer.json()
                for item in body["items"]:
                    item["node"], item["index"] = f"node{item['index'] // 8}", item["index"] % 8
                route.fulfill(response=answer, body=json.dumps(body))

            watched.page.route("**/v1/gpus", eight_nodes)
            page = watched.open()
            expect(page.locator(".folded a")).to_have_count(64)
            assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 844
            page.get_by_role("button", name="Unfold").first.click()
            expect(page.locator("[data-gpu]")).to_have_count(8)


def test_updates_leave_focus_and_selection(watched: Watched, running: DaemonProcess) -> None:
    """N8: a hundred changes of what is shown."""
    lease = ask(running, count=1, label="chosen text", ttl_s=6000)
    page = watched.open()
    link = card(page, 2).get_by_role("link")
    link.focus()
    page.evaluate("""() => getSelection().selectAllChildren(document.querySelector('[data-gpu="0"] .what'))""")
    page.evaluate(
        "window.updates = 0; new MutationObserver((seen) => { window.updates += seen.length })"
        ".observe(document.body, { subtree: true, childList: true, characterData: true })"
    )
    number = 0
    while number < 8 or page.evaluate("window.updates") < 100:  # a busy machine draws several at once
        assert number < 60
        number += 1
        other = ask(running, devices=[1], label=f"other {number}")
        expect(card(page, 1)).to_contain_text(f"other {number}")
        running.call("POST", f"/v1/leases/{other['id']}/release", {"token": other["token"]})
        expect(card(page, 1)).not_to_contain_text(f"other {number}")
    expect(link).to_be_focused()
    assert page.evaluate("getSelection().toString()") == "chosen text"
    assert lease["state"] == "active"
    watched.was_good()


@pytest.mark.parametrize(("touch", "least"), [(False, 24), (True, 44)])
def test_what_is_pressed_is_large_enough(browser: Browser, running: DaemonProcess, touch: bool, least: int) -> None:
    """S6: 24 pixels for a pointer, 44 for a finger."""
    ask(running, count=3, ttl_s=6000)
    waits = ask(running, count=4)
    width = 390 if touch else 1440
    with watching(browser, running, width=width, has_touch=touch, is_mobile=touch) as watched:
        page = watched.open()
        assert page.evaluate("matchMedia('(pointer: coarse)').matches") is touch
        for view in ("now", "timeline", "queue", "jobs", "usage", "events", f"leases/{waits['id']}"):
            page.evaluate("view => { location.hash = `#/${view}` }", view)
            expect(page.locator(f"main.view-{view.split('/')[0]} h1")).to_have_count(1)
            expect(page.get_by_text("Loading...")).to_have_count(0)
            assert page.evaluate(SMALL, least) == [], view
