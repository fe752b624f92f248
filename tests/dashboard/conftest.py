"""A browser, a daemon whose hardware can be changed, and a page that is watched for what it must not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, daemon

if TYPE_CHECKING:
    from playwright.sync_api import APIResponse, Browser, ConsoleMessage, Page, Request, Route

CHROMIUM = Path(__file__).parent / "chromium"
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WITHIN_MS = 60_000
"""For whatever a page is waited for: it is there within a second or two, on a machine that is not loaded."""
NOTES_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (seen) => violations.push(`${seen.violatedDirective} ${seen.blockedURI}`));
"""


class Watched:
    """A page, and what it has done."""

    def __init__(self, page: Page, running: DaemonProcess) -> None:
        self.page = page
        self.running = running
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)
        page.add_init_script(NOTES_VIOLATIONS)

    def open(self, view: str = "") -> Page:
        """The page with what the daemon shows, at a view such as `#/queue`."""
        self.page.goto(f"{self.running.url}/{view}")
        self.page.wait_for_selector("body[data-drawn]", timeout=WITHIN_MS)
        return self.page

    def forget(self) -> None:
        """Begin again: nothing has been done yet."""
        self.errors.clear()
        self.elsewhere.clear()

    def leave(self) -> None:
        """Close what is shown, with what it has stored and what a test answered in place of the daemon."""
        self.page.unroute_all(behavior="ignoreErrors")
        if self.page.url.startswith(self.running.url):
            self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.goto("about:blank")

    def was_good(self) -> None:
        """Fails if a script failed, the policy was violated, or a request went to another host."""
        assert self.errors == []
        assert self.elsewhere == []
        assert self.page.evaluate("window.violations") == []

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.running.url + "/", "data:")):
            self.elsewhere.append(request.url)


def whole_answer(route: Route) -> APIResponse:
    """What the daemon answers: never that the page has it already, as it does where nothing has changed meanwhile."""
    headers = {name: value for name, value in route.request.headers.items() if name != "if-none-match"}
    return route.fetch(headers=headers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Ended with the module, because Playwright keeps an event loop in this thread while it lives."""
    from playwright.sync_api import expect, sync_playwright  # noqa: PLC0415 - most tests of this folder need no browser

    assert shutil.which("chromium"), "the dashboard is tested in Chromium: bash tests/packages.sh installs it"
    expect.set_options(timeout=WITHIN_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(OPTIONS), headless=True, timeout=WITHIN_MS
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Hardware]]:
    """The daemon of the tests of a file: one that is new costs as much CPU as a test."""
    directory = tmp_path_factory.mktemp("dashboard")
    with simulation(directory) as (running, hardware):
        yield running, hardware


@pytest.fixture
def hardware(shared_daemon: tuple[DaemonProcess, Hardware]) -> Hardware:
    """Four free GPUs, until a test shows something else."""
    _, made = shared_daemon
    made.show({}, {}, {}, {})
    return made


@pytest.fixture
def running(shared_daemon: tuple[DaemonProcess, Hardware], hardware: Hardware) -> DaemonProcess:
    """A daemon with that hardware. It has a past, but nothing runs or waits; it may be killed."""
    started, _ = shared_daemon
    if not started.is_running():
        started.start()
    if started.get("/v1/nodes/n1").json["mode"] != "active":
        started.call("POST", "/v1/nodes/n1/resume")
    started.give_everything_back()
    return started


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Hardware]]:
    """A daemon without a past, for what shared GPUs would keep: how many there are, and their names."""
    with simulation(tmp_path) as (running, hardware):
        yield running, hardware


@pytest.fixture(scope="module")
def tab(browser: Browser, shared_daemon: tuple[DaemonProcess, Hardware]) -> Iterator[Watched]:
    """The tab of the tests of a file."""
    with watching(browser, shared_daemon[0]) as page:
        yield page


@pytest.fixture
def watched(tab: Watched, running: DaemonProcess) -> Iterator[Watched]:
    """A page of that daemon, not opened yet."""
    tab.forget()
    yield tab
    tab.leave()


@contextmanager
def simulation(directory: Path) -> Iterator[tuple[DaemonProcess, Hardware]]:
    """A daemon with four free GPUs, and its hardware."""
    hardware = Hardware(directory / "hardware.json")
    hardware.show({}, {}, {}, {})
    with daemon(directory, "--simulate", str(hardware.path), "--node", "n1") as running:
        yield running, hardware
        if running.is_running():
            running.end_everything()  # a job outlives its daemon


@contextmanager
def watching(
    browser: Browser, running: DaemonProcess, width: int = 1440, height: int = 900, **options: Any
) -> Iterator[Watched]:
    """A page in a browser profile of its own."""
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **options)
    context.set_default_timeout(WITHIN_MS)
    try:
        yield Watched(context.new_page(), running)
    finally:
        for routed in (*context.pages, context):
            routed.unroute_all(behavior="ignoreErrors")  # a request may be in flight
        context.close()
