"""What ends before its time, where its holder and those who wait look; and the usage of groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from re import compile as pattern
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.daemon import DaemonProcess, daemon, eventually
from tests.dashboard.conftest import watching, whole_answer
from tests.dashboard.test_page import ask, row, submit
from tests.dashboard.test_views import AXE, SCHEMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ("--simulate", "4", "--preemption", "--preempt-after", "0.1", "--preempt-notice", "300")
SHARES = ("--fair-share", "--group-share", "vision=2")


@dataclass(frozen=True)
class Preempted:
    """A request that waits, and what ends for it: a lease that still runs, and a job that is queued again."""

    running: DaemonProcess
    held: str
    job: str
    waits: str


@contextmanager
def preempted(directory: Path) -> Iterator[Preempted]:
    """A daemon with these three."""
    with daemon(directory, *OPTIONS, *SHARES) as running:
        limits = running.call("PUT", "/v1/limits/group/vision", {"max_gpus": 9, "members": ["root"]})
        assert limits.status in (200, 201), limits.text
        job = submit(running, "sleep", "600", name="sweep", priority="scavenge")["id"]
        running.wait_job(job, "running")
        held = ask(running, count=3, label="batch", priority="scavenge", ttl_s=900)["id"]
        waits = ask(running, count=4, label="demo", priority="normal", ttl_s=900)["id"]
        eventually(lambda: running.lease(held)["preempt_at"], 60)
        eventually(lambda: running.job(job)["state"] == "queued", 60)
        yield Preempted(running, held, job, waits)
        running.end_everything()


def without_violations(page: Page) -> None:
    """Fails if axe finds something, light or dark."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == [], scheme


@pytest.mark.budget(60)
def test_what_ends_for_a_request_is_said_at_both(browser: Browser, tmp_path: Path) -> None:
    """On the card and the lease that ends, at the request that waits for it, and at the job that waits again."""
    with preempted(tmp_path) as scene, watching(browser, scene.running, bypass_csp=True) as watched:
        page = watched.open()
        page.evaluate(AXE.read_text())
        until = page.locator(".card .until").filter(has_text="preempted in")
        expect(until).to_have_count(3)
        expect(until.first).to_have_text(pattern(r"^preempted in \d+m \d\ds$"))
        page.set_viewport_size({"width": 390, "height": 844})
        expect(until.first).to_be_visible()
        without_violations(page)
        page.evaluate("view => { location.hash = view }", f"#/leases/{scene.held}")
        expect(page.locator(".pairs")).to_contain_text("for a request that waits")
        expect(page.locator(".why")).to_contain_text(f"preempted, so that {scene.waits} of user root")
        page.evaluate("view => { location.hash = view }", f"#/jobs/{scene.job}")
        expect(page.locator(".pairs")).to_contain_text("preempted once, and waits again at its old place")
        page.evaluate("location.hash = '#/queue'")
        expect(row(page, "queue", "sweep")).to_contain_text("preempted once")
        page.get_by_role("button", name=f"Why does {scene.waits}").click()
        why = page.get_by_role("dialog")
        expect(why).to_contain_text(pattern(rf"It preempts {scene.held}, by .*\. It is to start on GPU 0, 1, 2, 3\."))
        expect(why).to_contain_text(
            pattern(r"that of groups first: group vision \d\.\d \(\d\.\d for each of 2 users\)")
        )
        expect(why).to_contain_text("In a group, and where groups have about as much, by user: root")
        without_violations(page)

        def taken_back(route: Route) -> None:
            answer = whole_answer(route)
            leases: dict[str, Any] = answer.json()
            at = (datetime.now(UTC) + timedelta(seconds=250)).isoformat()
            for lease in leases["items"]:
                lease |= {"preempt_at": None, "reclaim_at": at}
            route.fulfill(response=answer, body=json.dumps(leases))

        page.route("**/v1/leases?state=active*", taken_back)
        page.goto(f"{scene.running.url}/#/now")
        page.reload()
        expect(page.locator(".card .until").filter(has_text="taken back in 4m")).to_have_count(3)
        watched.was_good()
