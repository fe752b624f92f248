"""An error of TLS says which one it is, and what to do."""

from __future__ import annotations

import asyncio
import http.server
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable, InvalidRequest
from gpulease.sansio.effects import NotConnected, ResponseLost
from gpulease.sansio.failover import OutcomeUnknown
from gpulease.sansio.tls_errors import tls_failure
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.host import addresses, variables
from tests.client.fake_daemon import FakeDaemon


def certificate(directory: Path, name: str, *more: str) -> Path:
    path = directory / f"{name}.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    words += ["-subj", "/CN=gpulease", *more, "-keyout", str(path), "-out", str(path) + ".cert"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + Path(f"{path}.cert").read_text())
    return path


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"items": []}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if "hangs" in self.path:
            self.rfile.read()  # until the client goes away

    def log_message(self, *_: object) -> None:
        return


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tls")
    here = ("-addext", "subjectAltName=IP:127.0.0.1", "-days")
    return {
        "good": certificate(directory, "good", *here, "2"),
        "other": certificate(directory, "other", "-addext", "subjectAltName=DNS:gpubox", "-days", "2"),
    }


@pytest.fixture
def serve(files: dict[str, Path]) -> Iterator[object]:
    servers: list[Server] = []

    def start(name: str) -> str:
        server = Server(("127.0.0.1", 0), Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files[name])
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"https://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(url: str) -> DaemonUnavailable:
    """What both clients raise."""

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.gpus()

    with pytest.raises(DaemonUnavailable) as of_client, Client(url) as client:
        client.gpus()
    with pytest.raises(DaemonUnavailable) as of_async_client:
        asyncio.run(ask())
    assert str(of_client.value) == str(of_async_client.value)
    assert not of_client.value.may_come
    return of_client.value


def test_an_untrusted_certificate_is_called_that_and_trusted_by_its_file(serve, files, monkeypatch) -> None:
    url = serve("good")
    error = refusal(url)
    assert error.detail == f"The certificate of {url} is not trusted here: self-signed certificate."
    assert "--cacert FILE, GPULEASE_CACERT=FILE, or ca_file under [client]" in error.remedy
    monkeypatch.setenv(variables.CA_FILE, str(files["good"]))
    with Client(url) as client:
        assert client.gpus() == ()


def test_a_certificate_for_another_name_says_that(serve, files, monkeypatch) -> None:
    monkeypatch.setenv(variables.CA_FILE, str(files["other"]))
    assert refusal(serve("other")).detail.endswith("is not for 127.0.0.1.")


@pytest.mark.parametrize(("code", "said"), [(10, "has expired."), (9, "is not valid yet.")])
def test_a_certificate_out_of_its_time_says_that(code: int, said: str) -> None:
    """openssl makes no such certificate here, so this is what Python reports of one."""
    failure = ssl.SSLCertVerificationError(1, "certificate verify failed")
    failure.verify_code, failure.verify_message = code, "of OpenSSL"
    error = tls_failure(failure, NotConnected(str(failure)), addresses.parse("https://gpubox:8750"))
    assert error is not None
    assert error.sentence == f"The certificate of https://gpubox:8750 {said}"


def test_the_configuration_file_may_name_the_certificate(serve, files, monkeypatch, tmp_path: Path) -> None:
    configuration = tmp_path / "config.toml"
    (tmp_path / "daemon.pem").write_bytes(files["good"].read_bytes())
    configuration.write_text("[client]\nca_file = 'daemon.pem'\n")
    monkeypatch.setenv("GPULEASE_CONFIG", str(configuration))
    with Client(serve("good")) as client:
        assert client.gpus() == ()


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "of another kind"])
def test_a_file_without_certificates_is_refused_by_name(serve, monkeypatch, tmp_path: Path, content) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(variables.CA_FILE, str(path))
    with pytest.raises(InvalidRequest, match=str(path)):
        Client(serve("good")).gpus()


def test_http_to_a_server_that_speaks_tls_says_so(serve) -> None:
    url = serve("good")
    error = refusal(url.replace("https", "http"))
    assert error.detail == f"The server at {url.replace('https', 'http')} speaks TLS: use https://."
    assert error.remedy == f"Use {url}."


def test_https_to_a_server_without_tls_says_so(daemon: FakeDaemon) -> None:
    error = refusal(daemon.url.replace("http", "https"))
    assert error.detail.endswith("does not speak TLS.")
    assert error.remedy == f"Use {daemon.url}."


@pytest.mark.parametrize("path", ["/hangs", "/breaks-off"])
def test_a_call_that_was_sent_over_tls_may_have_taken_effect_although_no_response_comes(
    serve, files, monkeypatch, path: str
) -> None:
    monkeypatch.setenv(variables.CA_FILE, str(files["good"]))
    url, call = serve("good"), ApiCall(method="POST", path=path, read=lambda document: document, body={})

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.gpus()
            await client.send(call, timeout_s=0.5)

    with Client(url) as client:
        client.gpus()
        with pytest.raises(OutcomeUnknown) as of_client:
            client.send(call, timeout_s=0.5)
    with pytest.raises(OutcomeUnknown) as of_async_client:
        asyncio.run(ask())
    assert str(of_client.value) == str(of_async_client.value)


@pytest.mark.parametrize(("reason", "said"), [("TLSV13_ALERT_CERTIFICATE_REQUIRED", True), ("BAD_RECORD_TYPE", False)])
def test_a_server_that_wants_a_certificate_of_the_client_says_so_after_a_call(reason: str, said: bool) -> None:
    failure = ssl.SSLError(1, reason)
    failure.reason = reason
    error = tls_failure(failure, ResponseLost(reason), addresses.parse("https://gpubox:8750"))
    alert = "TLS with https://gpubox:8750 failed: tlsv13 alert certificate required."
    assert (error and error.sentence) == (alert if said else None)


def test_a_server_that_does_not_answer_the_greeting_of_tls_is_not_called_untrusted(monkeypatch) -> None:
    monkeypatch.setattr("gpulease.sansio.failover.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"

        async def ask() -> None:
            async with AsyncClient(url) as client:
                await client.gpus()

        with pytest.raises(DaemonUnavailable, match="timed out") as of_client, Client(url) as client:
            client.gpus()
        with pytest.raises(DaemonUnavailable, match="timed out") as of_async_client:
            asyncio.run(ask())
    assert of_client.value.may_come
    assert of_async_client.value.may_come
