"""The queue: which request is mine, when it may start, and a bell that rings once."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.daemon import DaemonProcess
from tests.dashboard.conftest import Watched, watching, whole_answer
from tests.dashboard.test_page import ask, row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECORDS_NOTIFICATIONS = """
window.Notification = class {
    static permission = "default";
    static async requestPermission() {
        window.asked = (window.asked ?? 0) + 1;
        return (window.Notification.permission = localStorage.getItem("answer") ?? "granted");
    }
    constructor(title, { body }) {
        localStorage.setItem("rung", `${localStorage.getItem("rung") ?? ""}${title}: ${body}\\n`);
    }
};
"""
HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.hasFocus = () => !hidden;
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_long_queue_is_filtered_by_size(watched: Watched, running: DaemonProcess) -> None:
    """Q1, Q3, Q4: fifty at once, the others on request; mine first, in the order of their positions."""
    ask(running, count=4)
    for number in range(60):
        ask(running, count=1 + number % 4, label=f"trial {number}")
    page = watched.open("#/queue")
    rows = page.locator("#queue tbody > tr")
    expect(rows).to_have_count(50)
    expect(page.locator(".my-next")).to_contain_text("Your next: trial 0, 1st in the queue, and 59 more of yours.")
    page.get_by_role("button", name="Show all 60").click()
    expect(rows).to_have_count(60)
    rows.last.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("lease-")
    page.go_back()
    expect(rows).to_have_count(60)
    places = [int(text) for text in page.locator("#queue tbody td.number").all_inner_texts()]
    assert places == sorted(places)
    page.get_by_role("button", name="2 to 4").click()
    expect(rows).to_have_count(45)
    page.reload()
    expect(page.locator(".facts").filter(has_text="45 waiting")).to_be_visible()
    watched.was_good()


def test_an_expected_time_is_only_what_the_daemon_says(watched: Watched, running: DaemonProcess) -> None:
    """Q2: with its basis; or that it is unknown; and no column where nothing is known."""
    ask(running, count=4)
    first, second, third, fourth = (ask(running, count=1, label=label) for label in ("one", "two", "three", "four"))
    page = watched.open("#/queue")
    expect(row(page, "queue", first["id"])).to_be_visible()
    expect(page.get_by_role("columnheader", name="Expected")).to_have_count(0)
    known = {
        first["id"]: ("2036-01-01T12:00:00Z", "declared"),
        second["id"]: ("2036-01-02T12:00:00Z", "a word of a newer daemon"),
    }

    def answer(route: Route) -> None:
        found = whole_answer(route)
        leases = found.json()
        for lease in leases["items"]:
            at, basis = known.get(lease["id"], (None, None))
            lease |= {"expected_at": at, "expected_basis": basis}
            if lease["id"] == fourth["id"]:
                lease |= {"expected_from": "2036-01-03T12:00:00Z", "expected_until": "2036-01-04T12:00:00Z"}
                lease |= {"expected_basis": "history", "expected_samples": 38}
        route.fulfill(response=found, body=json.dumps(leases))

    page.route("**/v1/leases?state=queued*", answer)
    page.reload()
    expect(row(page, "queue", first["id"])).to_contain_text("by declared times")
    expect(row(page, "queue", first["id"])).to_contain_text("2036-01-01")
    expect(row(page, "queue", second["id"])).to_contain_text("a word of a newer daemon")
    expect(row(page, "queue", second["id"])).to_contain_text("2036-01-02")
    expect(row(page, "queue", third["id"])).to_contain_text("unknown")
    expect(row(page, "queue", fourth["id"])).to_contain_text("2036-01-03")
    expect(row(page, "queue", fourth["id"])).to_contain_text("to 2036-01-04")
    expect(row(page, "queue", fourth["id"])).to_contain_text("by how long earlier leases lasted")
    watched.was_good()


def two_windows(context: BrowserContext, running: DaemonProcess) -> list[Page]:
    """Two windows of one browser at the queue."""
    context.add_init_script(RECORDS_NOTIFICATIONS)
    pages = [context.new_page(), context.new_page()]
    for page in pages:
        page.goto(f"{running.url}/#/queue")
        page.wait_for_selector("body[data-drawn]")
    return pages


def test_a_bell_rings_once_for_all_windows_also_while_they_are_hidden(browser: Browser, running: DaemonProcess) -> None:
    """W1: permission is asked for by the bell alone."""
    held = ask(running, count=4)
    waits = ask(running, count=2, label="eval")
    with watching(browser, running) as watched:
        pages = two_windows(watched.page.context, running)
        assert pages[0].evaluate("window.asked") is None
        pages[0].get_by_role("button", name="Notify me").click()
        pages[0].wait_for_function("window.asked === 1")
        pages[1].evaluate("Notification.permission = 'granted'")
        for page in pages:
            page.evaluate(HIDE, True)
        running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
        running.wait_active(waits["id"])
        # At once, or within a minute where the grant came before the event stream of the page.
        pages[0].wait_for_function("() => localStorage.getItem('rung')", timeout=120_000)
        for page in pages:
            page.evaluate(HIDE, False)
            expect(page.get_by_text("The queue is empty.")).to_be_visible()
        rung = pages[0].evaluate("localStorage.getItem('rung')")
        assert re.fullmatch(r"gpulease: granted: eval \(root\): GPU \d, \d of n1\n", rung)
        pages[0].wait_for_function("!Object.keys(localStorage).some(key => key.startsWith('gpulease-bells'))")


def test_a_bell_rings_for_a_grant_before_the_event_stream_begins(browser: Browser, running: DaemonProcess) -> None:
    held, waits, streams = ask(running, count=4), ask(running, count=2, label="eval"), list[Route]()

    def hold(route: Route) -> None:
        is_stream = "text/event-stream" in route.request.headers.get("accept", "")
        streams.append(route) if is_stream else route.continue_()

    with watching(browser, running) as watched:
        context = watched.page.context
        context.add_init_script(RECORDS_NOTIFICATIONS)
        context.route("**/v1/events*", hold)
        page = context.new_page()
        page.goto(f"{running.url}/#/queue")
        page.get_by_role("button", name="Notify me").click()
        page.evaluate(HIDE, True)
        running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
        running.wait_active(waits["id"])
        page.wait_for_function("window.asked === 1")
        context.unroute("**/v1/events*", hold)  # which lets those go on that are held
        assert streams
        page.wait_for_function("() => localStorage.getItem('rung')", timeout=30_000)


def test_without_permission_the_title_says_it(browser: Browser, running: DaemonProcess) -> None:
    """W2, W3: and the bell says why."""
    held = ask(running, count=4)
    ask(running, count=2, label="eval")
    with watching(browser, running) as watched:
        context = watched.page.context
        context.add_init_script("localStorage.setItem('answer', 'denied')")
        page = two_windows(context, running)[0]
        page.get_by_role("button", name="Notify me").click()
        expect(page.get_by_role("status").filter(has_text="does not allow notifications")).to_be_visible()
        context.pages[-1].close()
        page.evaluate(HIDE, True)
        running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
        expect(page).to_have_title(re.compile(r"^\* granted"))
        assert page.evaluate("localStorage.getItem('rung')") is None
        page.evaluate(HIDE, False)
        expect(page).not_to_have_title(re.compile("granted"))


def test_a_queue_entry_has_two_lines_on_a_phone(browser: Browser, running: DaemonProcess) -> None:
    """P1, P2, P4, P5, G1: totals and four cards above the fold, a tab bar below, and plots as wide as the screen.

    No job has ever had the GPU of the plots.
    """
    ask(running, count=4)
    for label in ("eval-sweep", "l" * 80):
        ask(running, count=2, label=label)
    with watching(browser, running, width=390, height=844) as watched:
        page = watched.open("#/queue")
        expect(page.locator("#queue tbody tr")).to_have_count(2)
        heights = page.locator("#queue tbody tr").evaluate_all("all => all.map(one => one.offsetHeight)")
        assert max(heights) <= 80
        page.get_by_role("link", name="Now").click()
        expect(page.locator("[data-gpu]")).to_have_count(4)
        bar = page.get_by_role("navigation").bounding_box()
        assert bar is not None
        assert (bar["x"], bar["width"], bar["y"] + bar["height"]) == (0, 390, 844)
        bottoms = page.locator("#totals, [data-gpu]").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().bottom)"
        )
        assert max(bottoms) <= bar["y"]
        page.goto(f"{running.url}/#/gpus/{running.gpus()[0]['uuid']}")
        expect(page.locator(".u-wrap")).to_have_count(4)
        widths = page.locator(".u-wrap").evaluate_all("all => all.map(one => one.offsetWidth)")
        assert min(widths) >= 340
        page.get_by_role("button", name="Zoom in").click()
        expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
        watched.was_good()


def test_reservations_are_shown_below_the_queue_and_cancelled(watched: Watched, running: DaemonProcess) -> None:
    """Those that have begun first, for whom and how long; nothing where there are none."""
    page = watched.open("#/queue")
    expect(page.locator("#queue, .none").first).to_be_visible()
    expect(page.locator("#reservations")).to_have_count(0)
    gpus = [gpu["uuid"] for gpu in running.call("GET", "/v1/gpus").json["items"]]
    now = datetime.now(UTC)
    times = {"course": (timedelta(hours=-1), timedelta(hours=3)), "<b>demo</b>": (timedelta(days=2), timedelta(days=3))}
    made = []
    for reason, (begin, end) in times.items():
        body = {"gpus": gpus[:2], "from_at": (now + begin).isoformat(), "to_at": (now + end).isoformat()}
        made.append(running.call("POST", "/v1/reservations", {**body, "user": "ada", "reason": reason}))
        assert made[-1].status == 201, made[-1].text
    rows = page.locator("#reservations tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("course")
    expect(rows.first).to_contain_text("now")
    expect(rows.last).to_contain_text("<b>demo</b>")
    expect(rows.last).to_contain_text(re.compile("in 1d 23h|in 2d"))
    rows.last.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("No lease ends.")
    dialog.get_by_role("button", name="Cancel the reservation for ada").click()
    expect(rows).to_have_count(1)
    left = running.call("GET", "/v1/reservations").json["items"]
    assert [one["reason"] for one in left] == ["course"]
    assert running.call("DELETE", f"/v1/reservations/{left[0]['id']}").status == 200
    expect(page.locator("#reservations")).to_have_count(0)
    watched.was_good()
