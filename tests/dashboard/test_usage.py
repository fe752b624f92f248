"""Usage: the page says what `gpulease usage` says."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.daemon import DaemonProcess, eventually
from tests.dashboard.conftest import Watched
from tests.dashboard.test_page import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PERIOD = ("2026-11-20T00:00:00Z", "2026-11-27T00:00:00Z")


def held(lease: dict[str, Any]) -> float:
    """Seconds from the grant of a lease to its end."""
    end, begin = (datetime.fromisoformat(lease[at]) for at in ("ended_at", "granted_at"))
    return (end - begin).total_seconds()


def share(
    key: str | None, held: float, used: float | None, idle: float | None, unknown: float = 0
) -> dict[str, object]:
    """One row as the daemon tells it."""
    hours = {"gpu_hours_held": held, "gpu_hours_used": used, "gpu_hours_idle": idle, "gpu_hours_unknown": unknown}
    return {"key": key, "leases": 3, **hours}


def test_the_numbers_are_those_of_the_daemon(watched: Watched, running: DaemonProcess) -> None:
    """U1, U4: held is the sum of the leases, as in `gpulease usage`; and the same after a restart of the daemon."""
    leases = [ask(running, count=count, label=label, ttl_s=1) for count, label in ((1, "vae"), (2, "eval"))]
    for lease in leases:
        while running.call("GET", f"/v1/leases/{lease['id']}?wait_s=30").json["state"] != "ended":
            pass

    def shares() -> Any:
        return running.call("GET", "/v1/usage?by=label").json["shares"]

    # What was read while a lease lasted is added up soon after its end.
    eventually(lambda: all(one["gpu_hours_idle"] is not None for one in shares()), 60, running.story)
    page = watched.open("#/usage?group=label")
    rows = page.locator("#usage tbody tr")
    expect(rows).to_have_count(3)
    usage = running.call("GET", "/v1/usage?by=label").json
    for one in usage["shares"]:
        cells = rows.filter(has_text=one["key"]).locator("td.number").all_inner_texts()
        assert cells[0] == f"{one['gpu_hours_held']:.2f}"
        assert cells[-1] == str(one["leases"])
    held_s = sum(len(lease["gpus"]) * held(running.lease(lease["id"])) for lease in leases)
    assert usage["gpu_hours_held"] == pytest.approx(held_s / 3600, rel=1e-3)
    printed = lambda: json.loads(running.gpulease("usage", "--by", "label", "--json").stdout)["shares"]  # noqa: E731
    eventually(lambda: printed() == shares(), 60, running.story)
    assert rows.last.locator("td").first.inner_text() == "all"
    before = rows.locator("td.number").all_inner_texts()
    running.stop()
    running.start()
    page.reload()
    expect(rows).to_have_count(3)
    assert rows.locator("td.number").all_inner_texts() == before
    watched.forget()  # that no daemon answered for a moment is in the console
    page.get_by_role("button", name="by day").click()
    ended = [running.lease(lease["id"]) for lease in leases]
    days = sorted({lease[at][:10] for lease in ended for at in ("granted_at", "ended_at")})  # two at midnight
    expect(rows).to_have_count(1 if len(days) == 1 else 3)  # with their sum
    expect(rows.first).to_contain_text(re.compile("|".join(days)))
    watched.was_good()


def test_limits_are_shown_with_their_use_and_set(watched: Watched, running: DaemonProcess) -> None:
    """An administrator sets limits, changes and removes them; what is over a limit waits, and the page says why."""
    first = ask(running, count=2, label="one", ttl_s=6000)
    page = watched.open("#/usage")
    row = page.locator("#limits tbody tr").filter(has_text="root")
    page.get_by_role("button", name="Set limits…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("root")
    dialog.get_by_label("GPUs", exact=True).fill("2")
    dialog.get_by_label("Longest time").fill("a day")
    expect(dialog.get_by_role("alert")).to_contain_text("The longest time is like 30m, 24h or 7d.")
    dialog.get_by_label("Longest time").fill("24h")
    dialog.get_by_role("button", name="Set limits").click()
    expect(row).to_contain_text("2 of 2")
    expect(row).to_contain_text("1d 0h")
    kept = running.call("GET", "/v1/limits/user/root").json
    assert (kept["max_gpus"], kept["max_lease_s"], kept["max_leases"]) == (2, 86_400, None)
    assert "max_queued" in kept["defaults"]  # what the form left out is still the configuration's

    waits = ask(running, count=1, label="two", time_s=3600, priority="scavenge")
    expect(row.locator('[data-label="Queue"]')).to_have_text("1")
    page.goto(f"{running.url}/#/queue")
    expect(page.locator("#queue tbody tr")).to_contain_text("1 GPU, scavenge for 1h 00m")
    page.goto(f"{running.url}/#/leases/{waits['id']}")
    expect(page.get_by_text("the limit is 2 at a time")).to_be_visible()
    page.goto(f"{running.url}/#/usage")
    page.get_by_role("button", name="Change the limits of user root").click()
    expect(dialog.get_by_label("GPUs", exact=True)).to_have_value("2")
    dialog.get_by_label("GPUs", exact=True).fill("4")
    dialog.get_by_label("GPU-hours", exact=True).fill("0.05")
    dialog.get_by_label("within").fill("2h")
    dialog.get_by_role("button", name="Set limits").click()
    expect(row).to_contain_text(re.compile(r"0\.0\d\d of 0\.05 in 2h"))
    expect(row).to_contain_text("3 of 4")
    page.goto(f"{running.url}/#/leases/{waits['id']}")
    expect(page.locator("dl")).to_contain_text("1h 00m, until")
    running.release(first)
    page.goto(f"{running.url}/#/usage")
    row.get_by_role("button", name="Remove…").click()
    expect(dialog).to_contain_text("The defaults of the configuration hold for them then.")
    dialog.get_by_role("button", name="Remove the limits of user root").click()
    expect(row).to_have_count(0)
    assert running.call("GET", "/v1/limits/user/root").json["max_gpus"] is None
    watched.was_good()


def test_bars_share_an_axis_and_rows_are_sorted(watched: Watched, tmp_path: Path) -> None:
    """U2, U3: bars begin at 0 and have one scale; who idles most comes first if that is asked for."""
    shares = [share("ada", 40, 30, 2), share("bram", 20, 5, 12, 1), share("chloe", 12, None, None, 12)]
    total = {**share(None, 72, 35, 14, 13), "from_at": PERIOD[0], "to_at": PERIOD[1], "by": "user", "shares": shares}
    watched.page.route("**/v1/usage*", lambda route: route.fulfill(json=total))
    page = watched.open("#/usage")
    names = page.locator("#usage tbody td:first-child")
    expect(names).to_have_text(["ada", "bram", "chloe", "all"])
    expect(page.locator("#usage tbody tr").nth(2)).to_contain_text("-")
    boxes = page.locator("#usage .usage-bar i.held").evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().left, one.getBoundingClientRect().width])"
    )
    assert len({round(left) for left, _ in boxes}) == 1
    assert [width / boxes[0][1] for _, width in boxes] == pytest.approx([1, 0.5, 0.3], abs=0.01)
    page.get_by_role("button", name="Idle").click()
    expect(names).to_have_text(["bram", "ada", "chloe", "all"])
    page.reload()
    expect(names).to_have_text(["bram", "ada", "chloe", "all"])
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    download.value.save_as(tmp_path / "usage.csv")
    assert (tmp_path / "usage.csv").read_text().splitlines()[:2] == [
        "user,gpu_hours_held,gpu_hours_used,gpu_hours_idle,gpu_hours_unknown,leases",
        "ada,40,30,2,0,3",
    ]
    watched.was_good()
