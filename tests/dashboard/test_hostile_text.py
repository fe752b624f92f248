"""What users write is text: a label, a name, a command or a log that looks like markup runs and loads nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess
from tests.dashboard.conftest import Watched, watching
from tests.dashboard.test_page import ask, card, row, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RAN = "ran=1"
IMAGE = f"<img src=x onerror={RAN}>"
SCRIPT = f"</span><script>{RAN}</script>"
NEW_UUID = "GPU-99999999-0000-0000-0000-000000000000"
ELSEWHERE = "<img src=http://example.org/x>"


def go(page: Page, view: str) -> None:
    """To another view, as by a link."""
    page.evaluate("view => { location.hash = `#/${view}` }", view)


def test_markup_of_users_stays_text(browser: Browser, fresh: tuple[DaemonProcess, Hardware]) -> None:
    running, hardware = fresh
    stranger = {"pid": 414242, "user": SCRIPT, "command": f"python {IMAGE}{SCRIPT}"}
    # A GPU's name is what it was when it was first seen, so this is another GPU.
    hardware.show({"uuid": NEW_UUID, "name": f"H100 {IMAGE}"}, {}, {"processes": [stranger]}, {})
    with watching(browser, running) as watched:
        page = watched.open()
        ask(running, count=1, label=IMAGE)
        job = submit(running, "sh", "-c", f"echo '{IMAGE}{SCRIPT}{ELSEWHERE}'; exit 1", name=ELSEWHERE)
        waits = ask(running, count=4, label=f"{SCRIPT}\u202egnp")

        expect(page.locator(".cards")).to_contain_text(f"H100 {IMAGE}")
        expect(page.locator(f'[data-uuid="{NEW_UUID}"] .what')).to_have_text(IMAGE)
        card(page, 2).get_by_role("link").click()
        expect(page.locator("#processes-table")).to_contain_text(f"python {IMAGE}")
        go(page, "queue")
        expect(row(page, "queue", waits["id"])).to_contain_text(SCRIPT[:20])
        expect(row(page, "queue", waits["id"])).not_to_contain_text("\u202e")
        row(page, "queue", waits["id"]).get_by_role("button", name="Why").click()
        expect(page.get_by_role("dialog")).to_contain_text("Waiting, 1st in the queue")
        page.keyboard.press("Escape")
        go(page, "events")
        expect(page.locator("#events")).to_contain_text(ELSEWHERE)
        go(page, "jobs")
        expect(row(page, "jobs", job["id"])).to_contain_text("failed")
        expect(row(page, "jobs", job["id"])).to_contain_text(ELSEWHERE)
        row(page, "jobs", job["id"]).get_by_role("link").click()
        expect(page.get_by_role("log").locator(".row")).to_have_text([f"{IMAGE}{SCRIPT}{ELSEWHERE}"])
        expect(page.get_by_role("heading", level=1)).to_have_text(ELSEWHERE)
        assert page.locator("img, main script, dialog script, iframe, object").count() == 0
        assert page.evaluate("window.ran") is None
        watched.was_good()


def test_a_name_from_right_to_left_leaves_what_follows_it_in_order(watched: Watched, running: DaemonProcess) -> None:
    """Digits after it would be drawn to its left: "1 ,NAMEst in the queue", and arguments of a command in reverse."""
    name = "\u05d0\u05d9\u05de\u05d5\u05df"
    ask(running, count=4, ttl_s=6000)
    for _ in range(2):
        ask(running, count=1, label=name)
    job = submit(running, "sleep", name, "2", "3")
    page = watched.open("#/queue")
    begins = """([place, text]) => {
        const texts = document.createTreeWalker(document.querySelector(place), NodeFilter.SHOW_TEXT);
        while (!texts.nextNode().data.includes(text));
        const range = document.createRange();
        const at = texts.currentNode.data.indexOf(text);
        range.setStart(texts.currentNode, at);
        range.setEnd(texts.currentNode, at + text.length);
        return range.getBoundingClientRect().left;
    }"""
    expect(page.locator(".my-next")).to_contain_text("1st")
    assert page.evaluate(begins, [".my-next", name]) < page.evaluate(begins, [".my-next", "1"])
    page.goto(f"{running.url}/#/jobs/{job['id']}")
    expect(page.locator(".command code")).to_have_text(f"$ sleep '{name}' 2 3")
    words = [page.evaluate(begins, [".command code", word]) for word in ("sleep", name, "2", "3")]
    assert words == sorted(words)
    watched.was_good()


def test_of_a_long_name_from_right_to_left_the_beginning_is_seen(watched: Watched, running: DaemonProcess) -> None:
    """Its end was there in place of it."""
    ask(running, count=1, label="\u05d0\u05d9\u05de\u05d5\u05df " * 8 + "\u05e2", ttl_s=6000)
    what = card(watched.open(), 0).locator(".what")
    expect(what).to_contain_text("\u05d0")
    assert what.evaluate("one => one.scrollWidth > one.clientWidth"), "it is not long enough to be cut"
    first = """one => {
        const range = document.createRange();
        range.setStart(one.firstChild, 0);
        range.setEnd(one.firstChild, 1);
        const [letter, box] = [range, one].map((each) => each.getBoundingClientRect());
        return letter.left >= box.left && letter.right <= box.right + 1;
    }"""
    assert what.evaluate(first)


def test_the_policy_stops_scripts_that_got_into_the_page(watched: Watched) -> None:
    page = watched.open()
    page.evaluate(
        "document.querySelector('main').innerHTML += '<img src=x onerror=window.ran=1><b style=color:red>b</b>'"
    )
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran=1'}))")
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")

    page.wait_for_function("violations.length >= 4")
    assert page.evaluate("window.ran") is None
    assert {text.split()[0] for text in page.evaluate("violations")} == {
        "script-src-attr",
        "script-src-elem",
        "style-src-attr",
        "connect-src",
    }
