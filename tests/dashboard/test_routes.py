"""Who gets the page and who the table in text, and how the page's files are served."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_server import dashboard
from gpulease_server.dashboard.content_negotiation import prefers_html
from tests.daemon import DaemonProcess, daemon
from tests.http_as_user import call

FOLDER = Path(dashboard.__file__).parent / "page"
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in dashboard.MEDIA_TYPES)
NAMES = [path.relative_to(FOLDER).as_posix() for path in FILES]
OWN = [path for path in FILES if path.parent.name != "vendor"]
BROWSERS = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that identifies no one by a connection to its port, but root by its socket."""
    with daemon(tmp_path_factory.mktemp("dashboard"), "--simulate", "2", "--behind-proxy") as started:
        yield started


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSERS, True),
        ("text/html", True),
        ("TEXT/HTML ; charset=utf-8", True),
        ("text/html, */*", True),
        ("text/plain;q=0.5, text/html;q=0.6", True),
        ("text/plain;q=0.5, text/*", True),
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("text/plain", False),
        ("text/html, text/plain", False),
        ("text/html;q=0.5, */*", False),
        ("text/html;q=0", False),
        ("text/html;q=nonsense", False),
        ("application/json", False),
        (",;,q=1", False),
    ],
)
def test_who_prefers_html(accept: str, page: bool) -> None:
    assert prefers_html([accept]) is page


def test_curl_gets_the_table_and_a_browser_the_page(running: DaemonProcess) -> None:
    table = call(running.socket, "GET", "/", Accept="*/*")
    page = call(running.socket, "GET", "/", Accept=BROWSERS)

    assert (table.status, table.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert table.content.decode().splitlines()[0].split() == [
        "GPU", "NAME", "MEMORY", "UTIL", "STATE", "HOLDER", "UNTIL",
    ]  # fmt: skip
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.content == (FOLDER / "index.html").read_bytes()
    assert "Accept" in table.headers["vary"].split(", ")
    assert "Accept" in page.headers["vary"].split(", ")


def test_an_unknown_caller_may_load_the_page_and_sees_no_data(running: DaemonProcess) -> None:
    assert running.call("GET", "/", Accept=BROWSERS).status == 200
    assert all(running.call("GET", f"/dashboard/{name}").status == 200 for name in NAMES if name != "index.html")
    for path in ("/", "/v1/gpus", "/v1/events"):
        assert running.call("GET", path).problem() == (401, "not_authenticated")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_its_media_type_and_a_content_security_policy(running: DaemonProcess, name: str) -> None:
    path, accept = ("/", BROWSERS) if name == "index.html" else (f"/dashboard/{name}", "*/*")
    answer = running.call("GET", path, Accept=accept)

    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == dashboard.MEDIA_TYPES[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    again = running.call("GET", path, Accept=accept, **{"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]
    other = running.call("GET", path, Accept=accept, **{"If-None-Match": '"other"'})
    assert other.status == 200


def test_a_long_file_may_come_compressed(running: DaemonProcess) -> None:
    answer = running.call("GET", "/dashboard/page.css", **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(answer.content) == (FOLDER / "page.css").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "no-such.js",
        "index.html",
        "__init__.py",
        "../libraries.json",
        "vendor/preact.LICENSE",
        "..%2fmain.py",
        "%2e%2e/main.py",
        "vendor/",
    ],
)
def test_there_are_no_other_files(running: DaemonProcess, name: str) -> None:
    assert running.call("GET", f"/dashboard/{name}").problem() == (404, "not_found")


def test_files_cannot_be_written(running: DaemonProcess) -> None:
    answer = running.call("POST", "/dashboard/main.js", {})
    assert answer.problem() == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"
    assert running.call("POST", "/", {}, Accept=BROWSERS).problem() == (405, "method_not_allowed")
    assert running.call("HEAD", "/", Accept=BROWSERS).status == 200


def test_another_name_for_this_host_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as trusting:
        answer = trusting.call("GET", "/", Accept=BROWSERS, Host="evil.example")
        assert answer.problem() == (403, "not_allowed")


def test_unknown_file_names_create_no_metric_series(running: DaemonProcess) -> None:
    for number in range(3):
        running.call("GET", f"/dashboard/number-{number}.js")
    shown = call(running.socket, "GET", "/metrics").content.decode()
    routes = set(re.findall(r'gpulease_http_requests_total\{[^}]*route="([^"]*dashboard[^"]*)"', shown))
    assert routes == {"/dashboard/{name:path}"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_sources_load_nothing_from_other_hosts_and_parse_no_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z]+\.", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=(?!\$\{)|\son[a-z]+=|javascript:", text)
    assert len(text.splitlines()) <= 450
    for name in re.findall(r'(?:from|import\() ?"(\.[\w./]+)"', text):
        assert (path.parent / name).resolve() in FILES or name.endswith("/openapi.js")  # types alone
    for name in re.findall(r'(?:src|href)="dashboard/([\w./]+)"', text):
        assert name in NAMES
