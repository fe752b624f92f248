"""What a user may do on the page: asked before, done once, refused in the daemon's words."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, daemon
from tests.dashboard.conftest import Watched, watching
from tests.dashboard.test_page import ask, card, submit
from tests.http_as_user import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTES_CORDON = """new MutationObserver(() => {
    const text = document.querySelector(".head .state")?.textContent.trim();
    if (text === "cordoned") window.cordonedAt ??= performance.now();
}).observe(document.body, { subtree: true, childList: true, characterData: true })"""
ANSWER = "performance.getEntriesByType('resource').find((one) => one.name.endsWith('/cordon')).responseStart"


def test_a_job_is_cancelled_once_and_not_by_accident(watched: Watched, running: DaemonProcess) -> None:
    """A2, A3: the focus is on the button that keeps it; a double click is one request."""
    job = submit(running, "sleep", "600", name="llama")
    page = watched.open(f"#/jobs/{job['id']}")
    sent: list[str] = []
    page.on("request", lambda asked: sent.append(asked.url) if asked.method == "POST" else None)
    page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog", name="Cancel llama?")
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    expect(dialog).to_contain_text("Its GPU is given back.")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Cancel…")).to_be_focused()
    assert sent == []
    assert running.call("GET", f"/v1/jobs/{job['id']}").json["ended_at"] is None

    page.get_by_role("button", name="Cancel…").click()
    dialog.get_by_role("button", name="Cancel llama").dblclick()
    expect(dialog).to_be_hidden()
    expect(page.locator(".job-head .state")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel…")).to_have_count(0)
    expect(page.get_by_role("heading", level=1)).to_be_focused()  # the button is gone
    assert len(sent) == 1
    watched.was_good()


def test_a_second_try_has_the_same_key_and_says_what_is_not_known(watched: Watched, running: DaemonProcess) -> None:
    """A1, A3, A4: the daemon's detail and remedy, word for word; and that it may have been done."""
    lease = ask(running, count=1, label="ada")
    page = watched.open(f"#/leases/{lease['id']}")
    keys: list[str] = []

    def answer(route: Route) -> None:
        keys.append(route.request.headers["idempotency-key"])
        if len(keys) == 1:
            problem = {"detail": "The disk is full.", "remedy": "Free some space.", "outcome": "unknown"}
            route.fulfill(status=503, body=json.dumps(problem), content_type="application/problem+json")
        else:
            route.continue_()

    page.route("**/release", answer)
    page.get_by_role("button", name="Release…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Its GPU is given back.")
    dialog.get_by_role("button", name="Release lease").click()
    expect(dialog.get_by_role("alert")).to_contain_text("The disk is full. Free some space. It is not known whether")
    dialog.get_by_role("button", name="Release lease").click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".head .state").first).to_have_text("ended")
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_an_administrator_cordons_and_drains(watched: Watched, running: DaemonProcess, hardware: Hardware) -> None:
    """A7: what is shown afterwards is what the daemon says, soon after its answer."""
    page = watched.open(f"#/gpus/{hardware.uuid(1)}")
    page.evaluate(NOTES_CORDON)
    took_ms: list[float] = []
    while not took_ms or (took_ms[-1] >= 2000 and len(took_ms) < 3):  # the machine may keep the browser from running
        page.evaluate("window.cordonedAt = undefined; performance.clearResourceTimings()")
        page.get_by_role("button", name="Cordon…").click()
        page.get_by_role("dialog").get_by_role("button", name="Cordon GPU 1 of n1").click()
        expect(page.locator(".head .state").first).to_have_text("cordoned")
        took_ms.append(page.evaluate("window.cordonedAt") - page.evaluate(ANSWER))
        print(f"answer to page: {took_ms[-1]:.0f} ms")
        assert took_ms[-1] >= 0, "before the answer"
        page.get_by_role("button", name="Uncordon…").click()
        page.get_by_role("dialog").get_by_role("button", name="Uncordon GPU 1 of n1").click()
        expect(page.locator(".head .state").first).to_have_text("free")
    assert took_ms[-1] < 2000  # 500 ms, and what a busy machine adds
    page.get_by_role("button", name="Drain…").click()
    page.get_by_label("Reason").fill("driver update till 15:00")
    page.get_by_role("dialog").get_by_role("button", name="Drain node n1").click()
    expect(page.get_by_role("button", name="Resume…")).to_be_visible()
    assert running.call("GET", "/v1/nodes/n1").json["mode_reason"] == "driver update till 15:00"
    page.get_by_role("link", name="Now").click()
    expect(page.locator(".node-head")).to_contain_text("driver update till 15:00")
    watched.was_good()


def test_a_drain_and_a_pause_name_the_leases(watched: Watched, running: DaemonProcess, hardware: Hardware) -> None:
    """A8: those that go on, and those for which the daemon refuses; its words are shown."""
    lease = ask(running, count=1, label="notebook", ttl_s=6000)
    page = watched.open(f"#/gpus/{hardware.uuid(2)}")
    page.get_by_role("button", name="Drain…").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"These leases go on: {lease['id']} of root, notebook.")
    page.get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Pause…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"while there are leases on it: {lease['id']} of root, notebook.")
    dialog.get_by_role("button", name="Pause node n1").click()
    refused = f"Node n1 has active leases: {lease['id']}. Drain it and pause it when they have ended."
    expect(dialog.get_by_role("alert")).to_have_text(refused)  # the page cannot force it
    watched.forget()  # the browser reports the 409
    running.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    expect(page.locator(".head .state").first).to_have_text("free")
    expect(dialog).to_contain_text(lease["id"])  # what is asked does not change under the pointer
    dialog.get_by_label("Reason").fill("new driver")
    dialog.get_by_role("button", name="Pause node n1").click()
    expect(page.get_by_role("button", name="Resume…")).to_be_visible()
    expect(page.get_by_role("button", name="Pause…")).to_have_count(0)
    assert running.call("GET", "/v1/nodes/n1").json["mode"] == "paused"
    watched.was_good()


def test_a_request_that_was_never_granted_held_nothing(watched: Watched, running: DaemonProcess) -> None:
    ask(running, count=4, ttl_s=6000)
    waits = ask(running, count=1)
    running.call("POST", f"/v1/leases/{waits['id']}/release", {})
    page = watched.open(f"#/leases/{waits['id']}")
    expect(page.locator(".pairs")).to_contain_text(re.compile(r"cancelled, waited for \ds"))


def test_a_dialog_stays_although_its_job_ends(watched: Watched, running: DaemonProcess) -> None:
    """A click that was meant for it would hit what lies below; the daemon refuses what is no longer so."""
    job = submit(running, "sleep", "600", name="llama")
    page = watched.open(f"#/jobs/{job['id']}")
    page.get_by_role("button", name="Cancel…").click()
    running.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0})
    expect(page.locator(".job-head .state")).to_have_text("cancelled")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Cancel…")).to_have_count(0)
    expect(page.get_by_role("heading", level=1)).to_be_focused()


def test_a_job_is_submitted_with_a_form(watched: Watched, running: DaemonProcess, tmp_path: Path) -> None:
    """It says how a terminal does the same, and what is wrong before it is sent; a double click is one job."""
    page = watched.open("#/jobs")
    page.get_by_role("button", name="Submit a job…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Command").fill("sh -c 'pwd; echo \"$0\"' 'two words")
    expect(dialog.get_by_role("alert")).to_contain_text("A quote in the command is not closed.")
    expect(dialog.get_by_role("button", name="Submit")).to_be_disabled()
    dialog.get_by_label("Command").fill("sh -c 'pwd; echo \"$0\"' 'two words'")
    dialog.get_by_label("GPUs").fill("2")
    dialog.get_by_label("Priority").select_option("scavenge")
    expect(dialog.get_by_label("Preemptible")).to_be_disabled()
    expect(dialog.get_by_label("Preemptible")).to_be_checked()
    dialog.get_by_label("Priority").select_option("normal")
    dialog.get_by_label("Preemptible").check()
    dialog.get_by_label("Name").fill("hello")
    dialog.get_by_label("Time limit").fill("10m")
    dialog.get_by_label("Directory").fill(str(tmp_path))
    expect(dialog.locator("code")).to_have_text(
        f"cd {tmp_path} && gpulease submit -n 2 --preemptible --name hello --time 10m"
        " -- sh -c 'pwd; echo \"$0\"' 'two words'"
    )
    sent: list[str] = []
    page.on("request", lambda asked: sent.append(asked.url) if asked.method == "POST" else None)
    dialog.get_by_role("button", name="Submit").dblclick()
    expect(page.get_by_role("heading", level=1)).to_have_text("hello")
    expect(page.get_by_role("log")).to_contain_text(str(tmp_path))
    expect(page.get_by_role("log")).to_contain_text("two words")
    expect(page.locator(".pairs")).to_contain_text("Preemptibleit may end, after a notice, for the first request")
    assert len(sent) == 1
    watched.was_good()


def test_an_old_value_says_how_old_it_is(watched: Watched, running: DaemonProcess) -> None:
    """A view whose request fails keeps what it has, says of when that is, and asks again when the daemon says."""
    lease = ask(running, count=1, label="ada", ttl_s=6000)
    page = watched.open(f"#/leases/{lease['id']}")
    expect(page.locator(".head .state").first).to_have_text("active")
    refused: list[float] = []

    def refuse(route: Route) -> None:
        refused.append(time.monotonic())
        route.fulfill(status=429, headers={"Retry-After": "4"}, json={"detail": "Too many requests."})

    page.route(f"**/v1/leases/{lease['id']}", refuse)
    expect(page.locator(".problem").first).to_have_text(re.compile(r"As of \d\d:\d\d:\d\d\. Too many requests\."))
    expect(page.locator(".head .state").first).to_have_text("active")
    while len(refused) < 2:
        page.wait_for_timeout(100)
    first, second, *_ = refused
    assert second - first >= 3.9  # it asks each three seconds where the daemon does not say when
    page.unroute(f"**/v1/leases/{lease['id']}")
    expect(page.locator("main .problem")).to_have_count(0)


def test_buttons_are_there_only_for_those_who_may(browser: Browser, tmp_path: Path) -> None:
    """A1, A6: a viewer has none, a user those of their own; the daemon refuses what is sent nevertheless."""
    with daemon(tmp_path, "--simulate", "2", "--behind-proxy") as closed:
        tokens = {
            user: call(closed.socket, "POST", "/v1/tokens", {"user": user, "role": role}).json["bearer"]
            for user, role in (("ada", "user"), ("bram", "user"), ("eve", "viewer"))
        }
        lease = call(closed.socket, "POST", "/v1/leases", {"count": 1}, Authorization=f"Bearer {tokens['ada']}").json
        with watching(browser, closed) as watched:
            page = watched.page
            page.goto(closed.url)
            for user, count in (("ada", 1), ("bram", 0), ("eve", 0)):
                page.get_by_label("Token").fill(tokens[user])
                page.get_by_role("button", name="Sign in").click()
                expect(page.locator(".me")).to_have_text(user)
                page.goto(f"{closed.url}/#/leases/{lease['id']}")
                expect(page.get_by_role("heading", level=1)).to_contain_text(lease["id"])
                expect(page.locator(".head .state").first).to_have_text("active")
                expect(page.get_by_role("button", name="Release…")).to_have_count(count)
                page.get_by_role("link", name="Now").click()
                card(page, 0).get_by_role("link").click()
                expect(page.get_by_role("heading", name="Processes")).to_be_visible()
                expect(page.locator(".act")).to_have_count(0)
                page.get_by_role("link", name="Jobs").first.click()
                expect(page.get_by_role("button", name="Submit a job…")).to_have_count(0 if user == "eve" else 1)
                page.get_by_role("button", name="Sign out").click()
