"""nginx with the lines of docs/security.md passes on what its defaults would end or refuse."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.http_as_user import call
from tests.ports import free_port
from tests.system.test_exposure import OverSocket, made_certificate

pytestmark = pytest.mark.slow

WITHIN_S = 30.0
DEFAULTS = "proxy_read_timeout 1s; client_max_body_size 10k;"
"""Far below those of nginx, so that the test is short: 60 s and 1 MiB."""

Send = Callable[[str, dict[str, Any] | None], Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Send]]:
    """A daemon behind nginx, and a function that sends a request through that."""
    assert shutil.which("nginx"), "install the package nginx"
    place = tmp_path_factory.mktemp("nginx")
    certificate, key = made_certificate(place)
    daemon, port = OverSocket(place / "d", "--simulate", "1", "--behind-proxy"), free_port()
    (block,) = (block.text for block in blocks(ROOT / "docs" / "security.md") if block.language == "nginx")
    for written, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/certs/gpubox.pem", str(certificate)),
        ("/etc/ssl/private/gpubox.key", str(key)),
        ("127.0.0.1:8750", f"127.0.0.1:{daemon.port}"),
    ):
        assert written in block
        block = block.replace(written, here)
    paths = "".join(
        f"{name}_temp_path {place}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (place / "nginx.conf").write_text(
        f"daemon off; pid {place}/pid; error_log {place}/error.log; events {{}} user root;\n"
        f"http {{ access_log off; {paths} {DEFAULTS}\n{block}}}\n"
    )
    trusting = ssl.create_default_context(cafile=str(certificate))
    proxy = subprocess.Popen(["nginx", "-e", f"{place}/error.log", "-p", str(place), "-c", f"{place}/nginx.conf"])
    try:
        daemon.start()
        bearer = call(daemon.socket, "POST", "/v1/tokens", {"user": "root"}).json["bearer"]

        def send(path: str, body: dict[str, Any] | None = None) -> Any:
            head = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            asked = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data, head)
            return urllib.request.urlopen(asked, timeout=WITHIN_S, context=trusting)

        def passes() -> bool:
            assert proxy.poll() is None, (place / "error.log").read_text()
            try:
                return bool(send("/healthz", None).status == 200)
            except (ConnectionError, urllib.error.URLError):
                return False

        eventually(passes, WITHIN_S, daemon.story)
        yield daemon, send
    finally:
        proxy.terminate()
        proxy.wait(WITHIN_S)
        daemon.stop()


def test_a_long_poll_lasts_as_long_as_it_asks_for(served: tuple[DaemonProcess, Send]) -> None:
    _, send = served
    held = json.load(send("/v1/leases?wait_s=20", {"count": 1, "ttl_s": 600}))
    assert held["state"] == "active"
    waiting = json.load(send("/v1/leases", {"count": 1, "ttl_s": 600}))
    polled = json.load(send(f"/v1/leases/{waiting['id']}?wait_s=2", None))
    assert polled["state"] == "queued"
    for lease in (waiting, held):
        send(f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})


def test_a_job_with_a_large_environment_is_taken(served: tuple[DaemonProcess, Send]) -> None:
    daemon, send = served
    environment = {f"V{number}": "\x01" * 10_000 for number in range(60)}  # 3.6 MB as JSON
    job = json.load(send("/v1/jobs", {"command": ["true"], "launcher": "plain", "environment": environment}))
    assert daemon.wait_job(job["id"], within_s=WITHIN_S)["state"] == "succeeded"


def test_a_followed_log_passes_line_by_line_and_may_be_silent(served: tuple[DaemonProcess, Send]) -> None:
    daemon, send = served
    job = json.load(send("/v1/jobs", {"command": ["sh", "-c", "echo a; sleep 2; echo b"], "launcher": "plain"}))
    with send(f"/v1/jobs/{job['id']}/logs?follow=1", None) as log:
        assert log.readline() == b"a\n"
        assert daemon.job(job["id"])["ended_at"] is None, "the line was held back"
        assert log.read() == b"b\n"
