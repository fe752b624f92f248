"""What a daemon shows to a network: nothing in the clear, and to no one who is not known."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpulease import Client, DaemonUnavailable
from gpulease_server.listeners import CannotStart
from gpulease_server.settings import ServeSettings
from gpulease_server.start_checks import check_tls
from tests.daemon import Answer, DaemonProcess, eventually
from tests.http_as_user import OTHER, acting_as, call
from tests.imported_program import completed

MOST_FILES = 600
"""Open files of a daemon, at most: 88 connections, and what it reserves."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    return made_certificate(tmp_path_factory.mktemp("tls"))


def made_certificate(directory: Path) -> tuple[Path, Path]:
    """A new one, with its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=gpulease"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    return certificate, key


def test_a_file_that_cannot_be_read_is_named(files: tuple[Path, Path]) -> None:
    for cert, key, named in (("/nope", files[1], "--tls-cert /nope"), (files[0], "/nope", "--tls-key /nope")):
        with pytest.raises(CannotStart, match=f"^{named} cannot be read: No such file or directory"):
            check_tls(ServeSettings(tls_cert=Path(cert), tls_key=Path(key)))


def test_a_daemon_that_may_have_too_few_files_open_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpulease_cli", "serve", "--simulate", "1", "--data-dir", str(tmp_path / "d")]
    limited = ["prlimit", "--nofile=20", *command, "--port", "0"]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "may have 20 files open at most, and needs 128." in ended.stderr
    assert "Traceback" not in ended.stderr


class OverSocket(DaemonProcess):
    """A daemon whose port speaks TLS: whether it is up is seen by its socket."""

    def get(self, path: str) -> Answer:
        """What a GET of this path over the socket is answered."""
        return call(self.socket, "GET", path)


@pytest.fixture
def exposed(tmp_path: Path, files: tuple[Path, Path]) -> Iterator[DaemonProcess]:
    """A daemon on every address, with TLS and at most three requests per second of each user."""
    words = ["--no-worker", "--host", "0.0.0.0", "--tls-cert", str(files[0]), "--tls-key", str(files[1])]
    running = OverSocket(tmp_path / "d", *words, "--max-rps-per-user", "3")
    try:
        yield running.start(ready=False)
    finally:
        running.stop()


def test_tls_and_a_token_open_the_door_and_nothing_else_does(exposed: DaemonProcess, files: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(files[0]))
    address = f"https://127.0.0.1:{exposed.port}"
    bearer = call(exposed.socket, "POST", "/v1/tokens", {"user": "ann", "expires_s": 3600}).json["bearer"]
    sent = urllib.request.Request(f"{address}/v1/leases?limit=1", headers={"Authorization": f"Bearer {bearer}"})
    with urllib.request.urlopen(sent, timeout=30, context=trusting) as answer:
        assert json.load(answer)["items"] == []
    wrong = urllib.request.Request(f"{address}/v1/leases", headers={"Authorization": "Bearer no"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(wrong, timeout=30, context=trusting)
    assert refused.value.code == 401
    assert refused.value.headers["WWW-Authenticate"].startswith("Bearer")
    refused.value.close()
    with pytest.raises(OSError):  # not TLS
        call(exposed.port, "GET", "/healthz")


def test_a_daemon_with_an_authority_of_its_own_is_trusted_by_who_knows_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = OverSocket(tmp_path / "d", "--no-worker", "--tls-auto", "--host", "0.0.0.0")
    url = f"https://127.0.0.1:{running.port}"
    try:
        running.start(ready=False)
        bearer = call(running.socket, "POST", "/v1/tokens", {"user": "ann"}).json["bearer"]
        with Client(url, bearer, retry_s=0.0) as client, pytest.raises(DaemonUnavailable, match="not trusted"):
            client.gpus()
        monkeypatch.setenv("GPULEASE_CACERT", str(running.data_dir / "tls" / "ca.pem"))
        with Client(url, bearer) as client:
            assert client.gpus() == ()
            running.stop()
            running.start(ready=False)
            assert client.gpus() == (), "after a restart it is the same authority"
    finally:
        running.stop()


@pytest.mark.slow
def test_a_certificate_that_is_replaced_is_shown_to_new_connections(
    exposed: DaemonProcess, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """As certbot and others do every few weeks. A key that does not belong to it, as in between, changes nothing."""
    before = ssl.get_server_certificate(("127.0.0.1", exposed.port), timeout=30)
    certificate, key = made_certificate(tmp_path)
    old = [file.read_bytes() for file in files]
    try:
        certificate.replace(files[0])
        eventually(lambda: "the one before is still in use" in exposed.story(), 60, exposed.story)
        assert ssl.get_server_certificate(("127.0.0.1", exposed.port), timeout=30) == before
        after = files[0].read_text()
        key.replace(files[1])
        shown = partial(ssl.get_server_certificate, ("127.0.0.1", exposed.port), timeout=30)
        eventually(lambda: shown() == after, 60, exposed.story)
    finally:
        for file, content in zip(files, old, strict=True):
            file.write_bytes(content)


def test_a_running_worker_takes_a_new_token_and_a_new_authority_from_their_files(tmp_path: Path) -> None:
    """Else its node is silent until someone restarts it, and after an hour its jobs are lost."""
    (tmp_path / "new").mkdir()
    files, token, authority = made_certificate(tmp_path), tmp_path / "token", tmp_path / "ca.pem"
    running = OverSocket(
        tmp_path / "d", "--no-worker", "--host", "0.0.0.0", "--tls-cert", str(files[0]), "--tls-key", str(files[1])
    )

    def put_token() -> str:
        made = call(running.socket, "POST", "/v1/tokens", {"user": "root", "role": "worker", "node": "n9"}).json
        token.write_text(made["bearer"])
        return str(made["id"])

    def is_ready() -> bool:
        return bool(call(running.socket, "GET", "/v1/nodes/n9").json.get("state") == "ready")

    def says(text: str) -> None:
        eventually(lambda: text in output.read_text(), 60, output.read_text)

    output = tmp_path / "worker.log"
    words = ["worker", "--url", f"https://127.0.0.1:{running.port}", "--node", "n9", "--token-file", str(token)]
    program = [sys.executable, "-P", "-m", "gpulease_cli", *words, "--data-dir", str(tmp_path / "w"), "--simulate", "1"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    try:
        running.start(ready=False)
        token.touch(0o600)
        authority.write_bytes(files[0].read_bytes())
        first = put_token()
        with output.open("wb") as log:
            worker = subprocess.Popen(program, env=kept | {"GPULEASE_CACERT": str(authority)}, stderr=log)
        try:
            eventually(is_ready, 60, output.read_text)
            assert call(running.socket, "DELETE", f"/v1/tokens/{first}").status == 200
            says("That token is not valid")
            put_token()
            says("the daemon answers again")

            running.stop()
            for made, file in zip(made_certificate(tmp_path / "new"), files, strict=True):
                made.replace(file)
            running.start(ready=False)
            says("is not trusted here")
            authority.write_bytes(files[0].read_bytes())
            eventually(is_ready, 60, output.read_text)
        finally:
            worker.kill()
            worker.wait()
    finally:
        running.stop()


def test_the_command_line_sends_the_token(exposed: DaemonProcess, files: tuple[Path, Path]) -> None:
    made = call(exposed.socket, "POST", "/v1/tokens", {"user": "ann", "role": "viewer"}).json
    environment = os.environ | {
        "GPULEASE_URL": f"https://127.0.0.1:{exposed.port}",
        "GPULEASE_TOKEN": made["bearer"],
        "SSL_CERT_FILE": str(files[0]),
    }

    def gpulease(*words: str) -> subprocess.CompletedProcess[str]:
        return completed(words, environment, 60)

    listed = gpulease("leases", "--json")
    assert (listed.returncode, json.loads(listed.stdout or "{}").get("items")) == (0, []), listed.stderr
    refused = gpulease("token", "list")
    assert refused.returncode == 1
    assert "not allowed" in refused.stderr


def test_who_asks_too_often_is_told_when_to_come_back_and_others_are_served(exposed: DaemonProcess) -> None:
    answers = [call(exposed.socket, "GET", "/v1/gpus") for _ in range(60)]
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.problem() == (429, "over_quota")
    assert int(refused.headers["retry-after"]) >= 1
    bearer_of_another = None
    while bearer_of_another is None:
        made = call(exposed.socket, "POST", "/v1/tokens", {"user": "bob"})
        bearer_of_another = made.json["bearer"] if made.status == 201 else None
    assert call(exposed.socket, "GET", "/v1/gpus", bearer=bearer_of_another).status == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--tls-cert"),
        (["--host", "::"], "--behind-proxy"),
        (["--tls-cert", "/no/such", "--tls-key", "/no/such"], "/no/such"),
        (["--tls-cert", "/no/such"], "together"),
        (["--socket-mode", "rw"], "file mode"),
        (["--worker", "--peer", "https://b.example:8750", "--peer", "http://a.example:8750"], "plain HTTP to another"),
    ],
)
def test_what_would_be_unsafe_or_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, words: list[str], said: str
) -> None:
    running = DaemonProcess(tmp_path / "d", "--no-worker", *words)
    ended = completed(running.command[3:], os.environ, 60)
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not running.data_dir.exists()


class FewDescriptors(OverSocket):
    """A daemon that may have few open files."""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {MOST_FILES}; exec "$@"', "sh", *super().command]


def test_connections_that_never_complete_their_handshake_keep_no_one_out(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    words = ["--no-worker", "--host", "0.0.0.0", "--tls-cert", str(files[0]), "--tls-key", str(files[1])]
    running = FewDescriptors(tmp_path / "d", *words)
    with contextlib.ExitStack() as stack:
        stack.callback(running.stop)
        running.start(ready=False)
        for _ in range(MOST_FILES + 400):
            with acting_as(OTHER if os.geteuid() == 0 else None):
                silent = stack.enter_context(socket.socket())
                silent.connect(("127.0.0.1", running.port))
        assert call(running.socket, "GET", "/v1/gpus").status == 200
        trusting = ssl.create_default_context(cafile=str(files[0]))
        with urllib.request.urlopen(
            f"https://127.0.0.1:{running.port}/healthz", timeout=30, context=trusting
        ) as answer:
            assert answer.status == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("words", [["serve", "--port", "0", "--simulate", "1"], ["worker", "--simulate", "1"]])
def test_a_data_directory_of_another_user_is_refused(tmp_path: Path, words: list[str]) -> None:
    """As `/tmp/gpulease`, made by a user before root starts a daemon with it: they could replace its database."""
    directory = tmp_path / "d"
    directory.mkdir(mode=0o755)
    os.chown(directory, OTHER, OTHER)
    refused = completed([*words, "--data-dir", str(directory)], dict(os.environ), 60)
    assert refused.returncode != 0
    assert f"it belongs to another user (uid {OTHER})" in refused.stderr
    assert "--data-dir" in refused.stderr
    assert list(directory.iterdir()) == []
