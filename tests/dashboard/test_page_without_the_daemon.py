"""What the page does when the daemon is away, does not know who asks, or is not the one that decides."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.daemon import DaemonProcess, daemon
from tests.dashboard.conftest import Watched, watching, whole_answer
from tests.dashboard.test_page import ask, card, row, submit
from tests.failover_pair import pair
from tests.http_as_user import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that identifies no one by a connection to its port."""
    with daemon(tmp_path_factory.mktemp("closed"), "--simulate", "2", "--behind-proxy") as started:
        yield started


def hide(page: Page) -> None:
    """As when another tab is looked at."""
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def show(page: Page) -> None:
    """As when its tab is looked at again."""
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


def test_the_page_reports_an_outage_and_recovers(watched: Watched, running: DaemonProcess) -> None:
    ask(running, count=1, label="ada: resnet", ttl_s=3600)
    page = watched.open()
    expect(card(page, 0)).to_contain_text("ada: resnet")
    notice = page.get_by_role("status")
    expect(notice).to_be_empty()
    running.kill()

    expect(notice).to_contain_text("Disconnected at")
    expect(notice).to_contain_text("Data from")
    expect(page.locator("body.stale")).to_be_visible()
    expect(card(page, 0)).to_contain_text("ada: resnet")
    running.start()
    expect(notice).to_be_empty()
    expect(page.locator("body.stale")).to_have_count(0)
    ask(running, count=1, label="after the restart")
    expect(card(page, 1)).to_contain_text("after the restart")
    assert watched.elsewhere == []


@pytest.mark.parametrize(
    "answer",
    [{"status": 302, "headers": {"Location": "/sign-in"}}, {"body": "<h1>Sign in</h1>", "content_type": "text/html"}],
    ids=["redirect", "form"],
)
def test_a_page_says_that_a_proxy_answers_whose_session_is_over(watched: Watched, answer: dict[str, Any]) -> None:
    page = watched.open()
    page.route("**/v1/**", lambda route: route.fulfill(**answer))
    notice = page.get_by_role("status")
    expect(notice).to_contain_text(
        "Something other than the daemon answers. If you came through a proxy where you sign in"
    )
    page.unroute_all(behavior="ignoreErrors")
    page.get_by_role("button", name="Retry now").click()
    expect(notice).to_be_empty()


def test_a_page_that_stays_open_follows_a_restored_database(browser: Browser, tmp_path: Path) -> None:
    """Its stream would be silent until there are as many events as before, and what was lost would be listed first."""
    with daemon(tmp_path, "--simulate", "2") as running, watching(browser, running) as watched:
        database, copy = running.data_dir / "gpulease.db", tmp_path / "copy.db"
        ask(running, count=1, label="kept", ttl_s=3600)
        running.stop()
        shutil.copyfile(database, copy)
        running.start()
        for _ in range(5):
            running.give_everything_back()
            lost = ask(running, count=1, label="lost", ttl_s=3600)
        last = running.get("/v1/events?order=desc&limit=1").json["items"][0]["seq"]
        other = watched.page.context.new_page()  # it reads the stream of the first one
        for page in (watched.page, other):
            page.goto(f"{running.url}/#/events")
            expect(page.locator("main")).to_contain_text("lease granted")
        running.stop()
        for file in running.data_dir.glob("gpulease.db*"):
            file.unlink()
        shutil.copyfile(copy, database)
        running.start()

        # It has the events that there are, and begins the stream after those.
        expect(watched.page.locator("#events li").filter(has_text="lost")).to_have_count(0)
        expect(watched.page.locator("#events li").filter(has_text="node ready")).to_have_count(2)
        made = ask(running, count=1, label="after the restore", ttl_s=3600)
        assert running.get("/v1/events?order=desc&limit=1").json["items"][0]["seq"] < last
        for page in (watched.page, other):
            expect(page.locator("#events li").filter(has_text=made["id"]).first).to_be_visible()
            expect(page.locator("#events li").filter(has_text=lost["id"])).to_have_count(0)


@pytest.mark.parametrize("file", ["main.js", "views/now.js"])
def test_a_page_whose_files_do_not_all_arrive_says_so_and_loads_itself_again(watched: Watched, file: str) -> None:
    page, lost = watched.page, []

    def lose(route: Route) -> None:
        lost.append(route.request.url)
        route.abort("connectionreset")

    page.route(f"**/dashboard/{file}", lose)
    page.goto(watched.running.url)
    expect(page.get_by_role("alert")).to_contain_text("one of its files did not arrive")
    page.unroute(f"**/dashboard/{file}")
    expect(card(page, 0)).to_be_visible()
    assert lost
    assert page.evaluate("sessionStorage.length") == 0


def test_a_style_sheet_that_does_not_arrive_is_asked_for_again(watched: Watched) -> None:
    page, lost = watched.page, []

    def lose(route: Route) -> None:
        lost.append(route.request.url)
        route.abort("connectionreset")

    page.route("**/dashboard/page.css", lose)
    watched.open()
    has_style = "() => getComputedStyle(document.body).margin === '0px'"
    assert lost
    assert not page.evaluate(has_style)
    page.unroute("**/dashboard/page.css")
    page.wait_for_function(has_style)
    expect(card(page, 0)).to_be_visible()


def test_a_page_with_files_of_two_releases_says_so_and_loads_itself_again(watched: Watched) -> None:
    """A browser that goes back, or opens its tabs again, takes some from its cache without asking."""
    page, given = watched.page, []

    def give_another(route: Route) -> None:
        given.append(route.request.url)
        route.fulfill(response=whole_answer(route), body="export const GIB = 1;")

    page.route("**/dashboard/format.js", give_another)
    page.goto(watched.running.url)
    expect(page.get_by_role("alert")).to_contain_text("of another release")
    page.unroute("**/dashboard/format.js")
    expect(card(page, 0)).to_be_visible()
    assert given
    assert page.evaluate("sessionStorage.length") == 0


def test_plots_are_drawn_although_their_library_arrives_late(watched: Watched, running: DaemonProcess) -> None:
    """It is fetched when the first plot is shown, which may be while the daemon is away."""
    page = watched.open()
    page.route("**/vendor/uplot.js", lambda route: route.abort("connectionreset"))
    with page.expect_event("requestfailed"):
        page.goto(f"{running.url}/#/gpus/{running.get('/v1/gpus').json['items'][0]['uuid']}")
    page.unroute("**/vendor/uplot.js")
    expect(page.locator(".plot canvas")).to_have_count(4)


def test_an_unknown_caller_signs_in_with_a_token(browser: Browser, closed: DaemonProcess) -> None:
    bearer = call(closed.socket, "POST", "/v1/tokens", {"user": "ann", "role": "viewer"}).json["bearer"]
    with watching(browser, closed) as watched:
        page = watched.page
        page.goto(closed.url)
        field = page.get_by_label("Token")
        expect(field).to_be_focused()
        expect(page.locator("#sign-in-problem")).to_be_empty()
        field.fill("not-a-token")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("token")
        expect(page.locator("body[data-drawn]")).to_have_count(0)
        field.fill(f"{bearer}\u200b")  # as it comes out of a chat
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("Copy it again")
        field.fill(bearer)
        page.get_by_role("button", name="Sign in").click()
        expect(card(page, 1)).to_contain_text("free")
        expect(field).to_be_hidden()
        assert bearer not in page.content()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

        job = call(closed.socket, "POST", "/v1/jobs", {"launcher": "plain", "command": ["true"], "name": "mine"}).json
        page.get_by_role("link", name="Jobs").click()
        expect(row(page, "jobs", job["id"])).to_contain_text("succeeded")
        page.get_by_role("link", name="mine").click()
        expect(page.locator("section.log").get_by_role("alert")).to_contain_text("You are ann (viewer")
        page.get_by_role("link", name="Now").click()
        page.reload()
        expect(card(page, 1)).to_contain_text("free")
        page.get_by_role("button", name="Sign out").click()
        expect(field).to_be_focused()
        assert watched.elsewhere == []


def test_a_revoked_token_is_asked_for_again(browser: Browser, closed: DaemonProcess) -> None:
    made = call(closed.socket, "POST", "/v1/tokens", {"user": "ann", "role": "viewer"}).json
    with watching(browser, closed) as watched:
        page = watched.page
        page.goto(closed.url)
        page.get_by_label("Token").fill(made["bearer"])
        page.keyboard.press("Enter")
        expect(card(page, 1)).to_contain_text("free")
        call(closed.socket, "DELETE", f"/v1/tokens/{made['id']}")
        expect(page.get_by_label("Token")).to_be_focused()
        expect(page.get_by_role("alert")).to_contain_text("revoked")


def test_another_token_shows_no_data_of_the_former_one(browser: Browser, closed: DaemonProcess) -> None:
    former, other, third = (
        call(closed.socket, "POST", "/v1/tokens", {"user": "ann", "role": role}).json
        for role in ("admin", "viewer", "viewer")
    )
    with watching(browser, closed) as watched:
        page = watched.page
        page.goto(closed.url)
        page.get_by_label("Token").fill(former["bearer"])
        page.keyboard.press("Enter")
        expect(page.locator(".events")).to_contain_text("token created")
        call(closed.socket, "DELETE", f"/v1/tokens/{former['id']}")
        page.get_by_label("Token").fill(other["bearer"])
        page.keyboard.press("Enter")
        expect(page.get_by_label("Token")).to_be_hidden()
        expect(card(page, 1)).to_contain_text("free")
        expect(page.locator(".events")).not_to_contain_text("token")

        call(closed.socket, "DELETE", f"/v1/tokens/{other['id']}")
        expect(page.get_by_label("Token")).to_be_focused()
        page.evaluate("bearer => sessionStorage.setItem('gpulease-token /', bearer)", third["bearer"])
        hide(page)
        show(page)
        expect(page.get_by_label("Token")).to_be_hidden()


def test_a_standby_shows_its_copy_and_names_the_writer(browser: Browser, tmp_path: Path, postgres_url: str) -> None:
    with pair(tmp_path, postgres_url) as both:
        ask(both.writer, count=1, label="ada: resnet", ttl_s=3600)
        with watching(browser, both.standby) as watched:
            page = watched.open()
            expect(page.get_by_role("status")).to_contain_text("This daemon is a standby")
            expect(page.locator(".cards")).to_contain_text("ada: resnet")
            expect(page.locator(".events")).to_contain_text("lease granted")


def test_a_rate_limited_user_is_shown_everything_eventually(browser: Browser, tmp_path: Path) -> None:
    with (
        daemon(tmp_path, "--simulate", "2", "--max-rps-per-user", "1") as running,
        watching(browser, running) as watched,
    ):
        page = watched.open()
        expect(card(page, 1)).to_contain_text("free")


@pytest.mark.parametrize("place", ["jobs/job-0123456789abcdef", "leases/lease-0123456789abcdef"])
def test_what_there_is_not_is_asked_for_once_in_a_minute(watched: Watched, place: str) -> None:
    """A tab that stays open at a job that was pruned asked two questions every 2 s."""
    page, asked = watched.page, []
    _, _, name = place.partition("/")
    page.on("request", lambda one: asked.append(one.url) if name in one.url else None)
    page.clock.install()
    watched.open(f"#/{place}")
    expect(page.get_by_role("alert")).to_contain_text(f"There is no {name.partition('-')[0]} {name}")
    page.clock.run_for(45_000)
    assert asked == [f"{watched.running.url}/v1/{place}"]
    with page.expect_response(f"**/v1/{place}"):
        page.clock.run_for(30_000)


def test_a_hidden_page_sends_no_requests(watched: Watched, running: DaemonProcess) -> None:
    page = watched.open()
    hide(page)
    submit(running, "true", name="unseen")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_function("start => performance.now() > start + 8000", arg=page.evaluate("performance.now()"))
    assert asked == []
    show(page)
    expect(page.locator(".events")).to_contain_text("unseen")


def test_a_page_of_an_older_daemon_says_so(watched: Watched) -> None:
    """After an upgrade behind an open window, as that of a wall: it goes on with what it knows."""
    watched.page.clock.install()
    page = watched.open("#/wall")
    expect(page.get_by_role("status")).to_be_empty()

    def upgraded(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"version": "9.9.9"})

    page.route("**/v1", upgraded)
    page.clock.fast_forward(61_000)
    expect(page.get_by_role("status")).to_contain_text("the daemon is 9.9.9 now")
    page.get_by_role("button", name="Reload").click()
    page.wait_for_selector("body[data-drawn]")
    page.clock.run_for(3000)
    expect(page.locator("[data-gpu]")).to_have_count(4)
    expect(page.get_by_role("status")).to_be_empty()
    watched.was_good()


def test_a_page_of_which_a_proxy_keeps_the_version_is_current_all_the_same(watched: Watched) -> None:
    """A proxy may let through only what is below `v1`: nginx redirects it where it has `location /v1/`."""
    watched.page.route("**/v1", lambda route: route.fulfill(body="another page"))
    with watched.page.expect_response(lambda answer: answer.url.endswith("/v1")):
        page = watched.open()
    expect(page.locator(".live")).to_have_text("live")
    watched.was_good()
