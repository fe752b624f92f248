"""The page while users lease, wait and compute."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess
from tests.dashboard.conftest import Watched, watching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GIB = 2**30


def card(page: Page, index: int) -> Locator:
    """The card of one GPU."""
    return page.locator(f'[data-gpu="{index}"]')


def row(page: Page, table: str, text: str) -> Locator:
    """The row of a table that has this text."""
    return page.locator(f"#{table} tbody > tr").filter(has_text=text)


def ask(running: DaemonProcess, **body: Any) -> dict[str, Any]:
    """A lease, granted or queued."""
    answer = running.call("POST", "/v1/leases", body)
    assert answer.status in (201, 202), answer.content
    found: dict[str, Any] = answer.json
    return found


def submit(running: DaemonProcess, *command: str, name: str = "", **more: Any) -> dict[str, Any]:
    """A job that runs a command."""
    body = {"launcher": "plain", "command": list(command), "name": name, **more}
    answer = running.call("POST", "/v1/jobs", body)
    assert answer.status == 201, answer.content
    found: dict[str, Any] = answer.json
    return found


def test_a_browser_that_lets_pages_keep_nothing_shows_it(browser: Browser, running: DaemonProcess) -> None:
    """As with all cookies blocked: even to look at the storage is an error."""
    with watching(browser, running) as watched:
        watched.page.add_init_script(
            "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name,"
            " { get() { throw new DOMException('denied', 'SecurityError'); } });"
        )
        page = watched.open()
        expect(page.locator("[data-gpu]")).to_have_count(4)
        page.get_by_role("button", name="Theme: auto").click()
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
        watched.was_good()


def test_the_hardware_is_shown(watched: Watched, hardware: Hardware) -> None:
    """A value that the driver does not tell is `?`, never 0."""
    busy = {"memory_used_bytes": 10 * GIB, "utilization_ratio": 0.55, "temperature_c": 61, "power_w": 412}
    silent = dict.fromkeys(("memory_used_bytes", "utilization_ratio", "temperature_c", "power_w"))
    warned = {"health": "xid:79", "warnings": ["row_remap_pending"]}
    hardware.show(busy, silent, warned, {"compute_mode": "prohibited"})
    page = watched.open()

    for text in ("10.0 / 80.0 GiB", "55%", "61 °C", "412 W"):
        expect(card(page, 0)).to_contain_text(text)
    expect(card(page, 1).locator(".use")).to_have_text("?")
    expect(card(page, 1).locator(".readings > span")).to_have_text(["? / 80.0 GiB", "?", "?"])
    expect(card(page, 2)).to_contain_text("unhealthy")
    expect(card(page, 2)).to_contain_text("row_remap_pending")
    expect(card(page, 2)).to_contain_text("xid:79")
    expect(card(page, 3)).to_contain_text("prohibited")
    expect(page.locator("#totals")).to_contain_text("1 prohibited")
    hardware.show({**busy, "utilization_ratio": 0.25}, {}, {}, {})
    expect(card(page, 0)).to_contain_text("25%")
    expect(card(page, 2)).not_to_contain_text("xid:79")
    watched.was_good()


def test_a_lease_comes_and_goes_without_a_reload(watched: Watched, running: DaemonProcess) -> None:
    page = watched.open()
    page.evaluate("window.sameDocument = true")
    expect(page.locator("#totals")).to_contain_text("4 free")
    lease = ask(running, count=2, label="ada: resnet", ttl_s=600)

    expect(card(page, 0)).to_contain_text("unused")
    expect(card(page, 1)).to_contain_text("ada: resnet")
    expect(page.locator("#totals")).to_contain_text("2 free")
    until = card(page, 0).locator(".until")
    expect(until).to_have_text(re.compile(r"^in 9m \d\ds$"))
    before = until.inner_text()
    expect(until).not_to_have_text(before)  # it counts down by itself
    expect(page.locator(".events")).to_contain_text("lease granted")
    running.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    expect(page.locator("#totals")).to_contain_text("4 free")
    expect(page.locator(".cards")).not_to_contain_text("ada: resnet")
    assert page.evaluate("window.sameDocument") is True
    watched.was_good()


def test_a_foreign_process_on_a_gpu_is_shown_with_its_pid(watched: Watched, hardware: Hardware) -> None:
    page = watched.open()
    stranger = {"pid": 414242, "memory_bytes": 3 * GIB, "user": "mallory", "command": "python mine.py"}
    hardware.show({}, {"processes": [stranger], "memory_used_bytes": 3 * GIB}, {}, {})

    for text in ("foreign", "pid 414242", "mallory"):
        expect(card(page, 1)).to_contain_text(text)
    card(page, 1).get_by_role("link").click()
    expect(page.get_by_role("heading", name="GPU 1 of n1")).to_be_focused()
    for text in ("414242", "mallory", "python mine.py", "3.0 GiB"):
        expect(row(page, "processes-table", "414242")).to_contain_text(text)
    hardware.show({}, {}, {}, {})
    expect(page.get_by_text("No process uses it.")).to_be_visible()
    page.go_back()
    expect(card(page, 1)).not_to_contain_text("414242")
    watched.was_good()


def test_the_queue_explains_itself_by_keyboard_only(watched: Watched, running: DaemonProcess) -> None:
    held = ask(running, count=3, label="ada: resnet")
    waits = ask(running, count=4, label="bob: sweep")
    page = watched.open("#/queue")

    expect(row(page, "queue", waits["id"])).to_contain_text("4 GPUs")
    expect(row(page, "queue", waits["id"])).to_contain_text("bob: sweep")
    why = row(page, "queue", waits["id"]).get_by_role("button", name="Why does")
    for _ in range(50):
        page.keyboard.press("Tab")
        if why.evaluate("button => button === document.activeElement"):
            break
    expect(why).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    for text in ("Waiting, 1st in the queue.", held["id"], "ada: resnet", "0 of n1"):
        expect(dialog).to_contain_text(text)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(why).to_be_focused()
    running.call("POST", f"/v1/leases/{waits['id']}/release", {})
    expect(page.get_by_text("The queue is empty.")).to_be_visible()
    watched.was_good()


def test_jobs_are_shown_with_their_logs(watched: Watched, running: DaemonProcess) -> None:
    page = watched.open("#/jobs")
    failed = submit(running, "sh", "-c", "echo half a line; exit 3", name="broken")
    lasting = submit(running, "sh", "-c", "echo epoch 1; sleep 600", name="digits")

    expect(row(page, "jobs", failed["id"])).to_contain_text("failed")
    expect(row(page, "jobs", failed["id"]).locator("td.number")).to_have_text("3")
    expect(row(page, "jobs", lasting["id"])).to_contain_text("running")
    page.get_by_role("link", name="broken").click()
    expect(page.get_by_role("log")).to_contain_text("half a line")
    page.go_back()
    running.call("POST", f"/v1/jobs/{lasting['id']}/cancel", {"grace_s": 0})
    expect(row(page, "jobs", lasting["id"])).to_contain_text("cancelled")
    watched.was_good()


def test_a_node_out_of_use_says_so(watched: Watched, running: DaemonProcess) -> None:
    page = watched.open()
    running.call("POST", "/v1/nodes/n1/drain")
    expect(page.locator(".node-head")).to_contain_text("draining")
    expect(card(page, 0)).to_contain_text("cordoned")
    running.call("POST", "/v1/nodes/n1/resume")
    expect(page.locator(".node-head")).not_to_contain_text("draining")
    watched.was_good()


def test_the_page_fits_a_phone(watched: Watched, running: DaemonProcess, hardware: Hardware) -> None:
    """S6: nothing is wider than the screen, whatever users write; nor than a laptop's."""
    hardware.show({"name": "N" * 100, "processes": [{"pid": 414242, "command": "c" * 200}]}, {}, {}, {})
    ask(running, count=3, label="l" * 200)
    for name in ("ada-elsewhere", "bob-elsewhere", "u" * 50):
        bearer = running.call("POST", "/v1/tokens", {"user": name}).json["bearer"]
        running.call("POST", "/v1/leases", {"count": 4}, Authorization=f"Bearer {bearer}")
    waits = ask(running, count=4, label="w" * 200)
    job = submit(running, "sh", "-c", "exit 1 # " + "x" * 300, name="j" * 200)
    running.call(
        "PUT", "/v1/limits/group/" + "g" * 100, {"max_gpus": 9, "gpu_hours": 5, "members": ["m" * 60, "n" * 60]}
    )
    views = ("now", "timeline", "usage", "queue", "jobs", "events", "wall")
    page = watched.open()
    expect(card(page, 3)).to_be_visible()
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => getComputedStyle(one).overflowX)"
    assert page.eval_on_selector_all(".card h3", cut) == ["hidden"]  # the model's name would lie on the state
    try:
        for width in (360, 390, 1024, 1440, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            for view in (*views, f"jobs/{job['id']}", f"gpus/{hardware.uuid(0)}", f"leases/{waits['id']}"):
                page.evaluate("address => { location.hash = address }", f"#/{view}")
                expect(page.locator(f"main.view-{view.split('/')[0]} h1")).to_have_count(1)
                expect(page.get_by_text("Loading...")).to_have_count(0)
                page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
    finally:
        page.set_viewport_size({"width": 1440, "height": 900})
    watched.was_good()
