"""`gpulease node add` and `gpulease node join`, on one host; tests/system/test_joining.py has two."""

from __future__ import annotations

import json
import shlex
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease import Client
from gpulease_protocol import endpoints
from gpulease_protocol.errors import InvalidRequest, NotAllowed, NotAuthenticated
from gpulease_protocol.joining import fingerprint, join_token, parse_join_token
from gpulease_protocol.tokens import NewBearerToken, Role, TokenRequest
from tests.daemon import Answer, DaemonProcess
from tests.http_as_user import call
from tests.imported_program import completed


class OverSocket(DaemonProcess):
    """A daemon whose port speaks TLS: whether it is up is seen by its socket."""

    def get(self, path: str) -> Answer:
        """What a GET of this path over the socket is answered."""
        return call(self.socket, "GET", path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverSocket]:
    daemon = OverSocket(tmp_path_factory.mktemp("joining") / "d", "--no-worker", "--tls-auto")
    try:
        daemon.start(ready=False)
        yield daemon
    finally:
        daemon.stop()


def url(running: OverSocket) -> str:
    return f"https://127.0.0.1:{running.port}"


def client(running: OverSocket, bearer: str | None = None) -> Client:
    return Client(f"unix://{running.socket}", bearer, retry_s=0.0)


def added(running: OverSocket, *words: str) -> list[str]:
    """The words of the command that is printed."""
    program = ("--url", f"unix://{running.socket}", "node", "add", *words, "--join-url", url(running))
    printed = completed(program, {}, 60)
    assert printed.returncode == 0, printed.stderr
    return shlex.split(printed.stdout)[1:]


def join_bearer(running: OverSocket, name: str, expires_s: float = 60.0) -> NewBearerToken:
    with client(running) as root:
        return root.create_token(TokenRequest(user="root", role=Role.JOIN, node=name, expires_s=expires_s))


@pytest.mark.parametrize("wrong", ["https://fd00::1:8750", "10.0.0.1:8750", "gpubox1", "http://gpubox1:8750"])
def test_an_address_at_which_no_host_can_join_is_refused_before_a_token_is_made(
    running: OverSocket, wrong: str
) -> None:
    program = ("--url", f"unix://{running.socket}", "node", "add", "gpubox7", "--join-url", wrong)
    printed = completed(program, {}, 60)
    assert (printed.returncode, printed.stdout) == (2, "")
    assert "--join-url: " in printed.stderr
    with client(running) as root:
        assert "gpubox7" not in {one.node for one in root.tokens()}


def test_the_command_that_is_printed_makes_a_host_a_node(running: OverSocket, tmp_path: Path) -> None:
    command = added(running, "gpubox2")
    joined = completed([*command, "--data-dir", str(tmp_path / "w")], {}, 60)
    assert joined.returncode == 0, joined.stderr
    assert f"This host is node gpubox2 of {url(running)}" in joined.stdout
    assert command[-1].split(".")[1] not in joined.stdout
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "w").iterdir()}
    assert modes == {"token": 0o600, "environment": 0o600, "ca.pem": 0o644}
    assert (tmp_path / "w" / "ca.pem").read_text().strip() == (running.data_dir / "tls" / "ca.pem").read_text().strip()
    with client(running, (tmp_path / "w" / "token").read_text().strip()) as worker:
        me = worker.me()
        assert (me.role, me.node) == (Role.WORKER, "gpubox2")
        with pytest.raises(NotAllowed):
            worker.tokens()
        with pytest.raises(NotAllowed):
            worker.create_token(TokenRequest(user="eve"))
        with pytest.raises(NotAllowed):
            worker.jobs()
    (tmp_path / "w2").mkdir()
    (tmp_path / "w2" / "ca.pem").write_text("of another daemon")
    again = completed([*command, "--data-dir", str(tmp_path / "w2")], {}, 60)
    kept = {path.name: path.read_text() for path in (tmp_path / "w2").iterdir()}
    assert kept == {"ca.pem": "of another daemon"}, "a join that fails leaves a host as it was"
    assert again.returncode == 1
    assert "was used already, has expired, or was revoked" in again.stderr
    assert "gpulease node add gpubox2" in again.stderr


def test_a_daemon_that_no_other_host_reaches_says_so(running: OverSocket) -> None:
    refused = completed(["--url", f"unix://{running.socket}", "node", "add", "gpubox2"], {}, 60)
    assert refused.returncode == 1
    assert "listens on loopback alone" in refused.stderr
    assert "--tls-auto" in refused.stderr


def test_what_is_no_join_token_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = ["node", "join", "https://127.0.0.1:9", "nonsense", "--data-dir", str(tmp_path / "w")]
    refused = completed(words, {}, 60)
    assert refused.returncode == 2
    assert "no join token" in refused.stderr
    assert not (tmp_path / "w").exists()


def test_of_many_who_send_a_join_token_one_gets_the_workers(running: OverSocket) -> None:
    made = join_bearer(running, "n5")
    outcomes: list[object] = []

    def join() -> None:
        with client(running, made.bearer) as host:
            try:
                outcomes.append(host.send(endpoints.join_node("n5")).node)
            except NotAuthenticated:
                outcomes.append(None)

    hosts = [threading.Thread(target=join) for _ in range(8)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(60)
    assert sorted(outcomes, key=str) == [None] * 7 + ["n5"]


def test_a_join_token_joins_as_its_node_and_does_nothing_else(running: OverSocket) -> None:
    made = join_bearer(running, "n6")
    with client(running, made.bearer) as host:
        assert (host.me().role, host.me().node) == (Role.JOIN, "n6")
        with pytest.raises(NotAllowed, match="for node n6 and for no other"):
            host.send(endpoints.join_node("n7"))
        for refused in (host.gpus, host.nodes, host.leases, host.tokens):
            with pytest.raises(NotAllowed):
                refused()
    report = {"worker_id": "w", "host": "h", "hold_s": 0}
    assert call(running.socket, "POST", "/v1/nodes/n6/exchange", report, bearer=made.bearer).status == 403
    with client(running) as root:
        with pytest.raises(NotAllowed, match="joins with a join token"):
            root.send(endpoints.join_node("n6"))
        root.revoke_token(made.id)
    with client(running, made.bearer) as host, pytest.raises(NotAuthenticated):
        host.send(endpoints.join_node("n6"))


def test_a_join_token_lasts_a_while_and_survives_a_restart(running: OverSocket) -> None:
    made = join_bearer(running, "n8", expires_s=3600.0)
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == timedelta(hours=1)
    soon = join_bearer(running, "n9", expires_s=0.001)
    with client(running, soon.bearer) as host, pytest.raises(NotAuthenticated):
        host.send(endpoints.join_node("n9"))
    running.stop()
    running.start(ready=False)
    with client(running, made.bearer) as host:
        assert host.send(endpoints.join_node("n8")).role is Role.WORKER


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"expires_s": 60}, "node: must be given"),
        ({"node": "n"}, "expires_s: must be at most 7 days"),
        ({"node": "n", "expires_s": 8 * 86400}, "expires_s: must be at most 7 days"),
    ],
)
def test_a_join_token_is_for_a_node_and_for_days_at_most(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TokenRequest(user="root", role=Role.JOIN, **fields)  # type: ignore[arg-type]


def test_the_token_says_which_authority_to_trust(running: OverSocket) -> None:
    shown = json.loads(call(running.socket, "GET", "/v1/ca").content)
    assert shown["fingerprint"] == fingerprint(shown["certificate"])
    assert parse_join_token(join_token("token-a.b", shown["fingerprint"])) == ("token-a.b", shown["fingerprint"])
    assert parse_join_token("token-a.b\n") == ("token-a.b", None)
    for wrong in ("", "token-a", "token-a.b.c", f"token-a.b.{'0' * 63}", f"token a.b.{'0' * 64}"):
        with pytest.raises(InvalidRequest, match="no join token"):
            parse_join_token(wrong)


@pytest.mark.parametrize("more", ["", "a second certificate"])
def test_a_certificate_beside_the_pinned_one_is_not_kept(
    running: OverSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """Who is between the two hosts may add an authority of their own to the answer."""
    from gpulease_cli.commands import node_join  # noqa: PLC0415

    true = json.loads(call(running.socket, "GET", "/v1/ca").content)["certificate"]
    monkeypatch.setattr(node_join, "_fetch", lambda _: f"{true}{true if more else ''}")
    found = node_join.addresses.candidates(url(running))
    if more:
        with pytest.raises(node_join.DaemonUnavailable, match="another authority"):
            node_join._trusted(found, fingerprint(true), tmp_path)
        assert not (tmp_path / ".new-ca.pem").exists()
    else:
        assert node_join._trusted(found, fingerprint(true), tmp_path) == str(tmp_path / ".new-ca.pem")
        assert (tmp_path / ".new-ca.pem").read_text() == true
