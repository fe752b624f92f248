"""A client sends nothing to another user's process at its daemon's address."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable
from gpulease.sansio import server_check
from gpulease.sansio.effects import NotConnected, NotTrusted
from gpulease.sansio.failover import Destination
from gpulease.sansio.tls_errors import speaks_tls
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import addresses, config_file, server_owner
from gpulease_protocol.host.config_file import ConfigurationRefused
from gpulease_protocol.host.server_owner import may_be_daemon, server_uid
from gpulease_worker.loop import WorkerLoop
from gpulease_worker.settings import WorkerSettings
from tests.client.fake_daemon import FakeDaemon
from tests.daemon import eventually
from tests.imported_program import CONTEXT, completed
from tests.squatter import EVE, ROOT, TOKEN, Squatter
from tests.worker.strangers import passable

AS_ANOTHER_USER = pytest.mark.skipif(not ROOT, reason="only root can be another user")
ADA = 54322
"""Another user whom no database knows."""
REFUSED = rf"served by user {EVE}, not by root; nothing was sent to it"

Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("GPULEASE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config_file, "SYSTEM", tmp_path / "config.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(params=["Client", "AsyncClient"])
def gpus(request: pytest.FixtureRequest) -> Ask:
    """Asks the daemon at a URL for its GPUs, with a token."""

    def ask(url: str | None = None) -> Any:
        if request.param == "Client":
            with Client(url, token=TOKEN) as client:
                return client.gpus()

        async def work() -> Any:
            async with AsyncClient(url, token=TOKEN) as client:
                return await client.gpus()

        return asyncio.run(work())

    return ask


@pytest.fixture(params=["127.0.0.1", "::1", "socket"])
def squatter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Squatter, str]]:
    """Eve at an address, and its URL."""
    with ExitStack() as stack:
        place = stack.enter_context(passable()) / "hers"
        place.mkdir()
        path = place / "gpulease.sock"
        address = path if request.param == "socket" else (request.param, 0)
        eve = stack.enter_context(Squatter(address, tmp_path / "record"))
        host = f"[{request.param}]" if ":" in request.param else request.param
        yield eve, f"unix://{path}" if request.param == "socket" else f"http://{host}:{eve.port}"


@AS_ANOTHER_USER
def test_nothing_is_sent_to_another_user(squatter: tuple[Squatter, str], gpus: Ask) -> None:
    eve, url = squatter
    with pytest.raises(DaemonUnavailable, match=REFUSED) as refused:
        gpus(url)
    assert f"GPULEASE_DAEMON_USER={EVE}" in refused.value.remedy
    eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
def test_whether_another_user_speaks_tls_is_not_tried(tmp_path: Path) -> None:
    with Squatter(("127.0.0.1", 0), tmp_path / "record") as eve:
        url = f"http://127.0.0.1:{eve.port}"
        with Client(url) as client:
            assert not speaks_tls(addresses.parse(url), client.destination)
        eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
def test_the_command_line_says_who_listens(squatter: tuple[Squatter, str]) -> None:
    eve, url = squatter
    environment = os.environ | {"GPULEASE_URL": url, "GPULEASE_TOKEN": TOKEN}
    refused = completed(["run", "-n", "1", "--", "env"], environment, 60)
    assert refused.returncode == 125
    assert refused.stdout == ""
    assert f"served by user {EVE}, not by root" in refused.stderr
    assert "  do:  If the daemon is to run as" in refused.stderr
    eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
def test_a_connection_that_is_not_accepted_yet_is_the_listeners(tmp_path: Path, gpus: Ask) -> None:
    with (
        Squatter(("127.0.0.1", 0), tmp_path / "record", accepts=False) as eve,
        pytest.raises(DaemonUnavailable, match=REFUSED),
    ):
        gpus(f"http://127.0.0.1:{eve.port}")
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()) as caller:
        assert server_uid(caller) == os.geteuid()
        accepted, _ = own.accept()
        with accepted:
            assert server_uid(caller) == os.geteuid()


@AS_ANOTHER_USER
def test_each_new_connection_is_checked(daemon: FakeDaemon, tmp_path: Path) -> None:
    with Client(daemon.url, token=TOKEN, retry_s=0.5) as client:
        client.gpus()
        daemon.stop()
        with Squatter(("127.0.0.1", daemon.port), tmp_path / "record") as eve:
            with pytest.raises(DaemonUnavailable):  # the connection of before breaks off
                client.gpus()
            with pytest.raises(DaemonUnavailable, match=REFUSED):
                client.gpus()
            eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))
        daemon.start()
        assert client.gpus() == ()


def ask_as(uid: int, url: str, own_url: str, answer: Connection) -> None:
    """In a process of its own: be this user, and send how a client is answered at a URL."""
    with Client(own_url) as client:
        client.gpus()  # imports what the user may not be able to read
    os.environ["GPULEASE_CONFIG"] = os.devnull
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    try:
        with Client(url, token=TOKEN) as client:
            answer.send(str(client.gpus()))
    except DaemonUnavailable as error:
        answer.send(error.detail)


@AS_ANOTHER_USER
@pytest.mark.parametrize(
    ("uid", "of_eve", "said"),
    [
        (ADA, False, "()"),
        (ADA, True, f"served by user {EVE}, not by root or you; nothing was sent to it"),
        (EVE, True, "broke off during"),
    ],
    ids=["the daemon is root's", "it is another user's", "it is their own"],
)
def test_an_ordinary_user_believes_root_and_themselves(
    daemon: FakeDaemon, tmp_path: Path, uid: int, of_eve: bool, said: str
) -> None:
    own, theirs = CONTEXT.Pipe()
    with Squatter(("127.0.0.1", 0), tmp_path / "record", answers=False) as eve:
        url = f"http://127.0.0.1:{eve.port}" if of_eve else daemon.url
        process = CONTEXT.Process(target=ask_as, args=(uid, url, daemon.url, theirs), daemon=True)
        process.start()
        assert own.poll(60)
        assert said in own.recv()
        process.join(60)
        if of_eve and uid != EVE:
            eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
def test_the_next_address_is_tried(daemon: FakeDaemon, tmp_path: Path) -> None:
    with Squatter(("127.0.0.1", 0), tmp_path / "record") as eve:
        with Client([f"http://127.0.0.1:{eve.port}", daemon.url], token=TOKEN) as client:
            assert client.gpus() == ()
        eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
@pytest.mark.parametrize("where", ["variable", "file", "any"])
def test_who_is_named_is_believed(where: str, monkeypatch, tmp_path: Path, gpus: Ask) -> None:
    if where == "file":
        (tmp_path / "config.toml").write_text(f"[client]\ndaemon_user = 'no-such-user, {EVE}'\n")
    else:
        monkeypatch.setenv("GPULEASE_DAEMON_USER", "*" if where == "any" else str(EVE))
    with Squatter(("127.0.0.1", 0), tmp_path / "record") as eve:
        with pytest.raises(Exception, match="503"):
            gpus(f"http://127.0.0.1:{eve.port}")
        assert TOKEN.encode() in eve.recorded, "this is what eve would have had"


@AS_ANOTHER_USER
def test_a_file_of_another_user_names_no_one(monkeypatch, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(f"[client]\ndaemon_user = '{EVE}'\n")
    os.chown(other, EVE, EVE)
    monkeypatch.setenv("GPULEASE_CONFIG", str(other))
    with pytest.raises(ConfigurationRefused, match="counts only in a file of root's or of your own"):
        may_be_daemon(EVE)


def test_the_owner_of_the_systems_data_directory_is_believed_but_not_obeyed(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server_owner, "owner_of_system_data_dir", lambda: EVE)
    assert may_be_daemon(EVE)
    assert not may_be_daemon(EVE, obeyed=True)
    assert may_be_daemon(0, obeyed=True)
    assert may_be_daemon(os.geteuid(), obeyed=True)
    assert not may_be_daemon(EVE + 1)
    assert not may_be_daemon(None)


def test_only_a_directory_that_root_has_made_has_an_owner_that_counts(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(addresses, "SYSTEM_DATA_DIR", tmp_path / "var" / "gpulease")
    assert addresses.owner_of_system_data_dir() is None
    (tmp_path / "var" / "gpulease").mkdir(parents=True)
    assert addresses.owner_of_system_data_dir() == (0 if ROOT else None)
    (tmp_path / "var").chmod(0o777)
    assert addresses.owner_of_system_data_dir() is None, "anybody could have made it"


def test_a_default_client_goes_to_the_port_only_on_a_host_without_the_systems_directory(monkeypatch, tmp_path) -> None:
    environ = {"XDG_DATA_HOME": str(tmp_path / "home")}
    system = tmp_path / "gpulease"
    monkeypatch.setattr(addresses, "SYSTEM_DATA_DIR", system)
    monkeypatch.setattr(addresses, "default_data_dir", lambda environ: tmp_path / "home" / "gpulease")
    assert [one.url for one in addresses.candidates(None, environ)] == [addresses.DEFAULT_URL]
    monkeypatch.setattr(addresses, "owner_of_system_data_dir", lambda: 0)
    system.mkdir()
    assert [one.url for one in addresses.candidates(None, environ)] == [f"unix://{system}/gpulease.sock"]
    monkeypatch.setenv("XDG_DATA_HOME", environ["XDG_DATA_HOME"])
    with Client() as client, pytest.raises(DaemonUnavailable, match=f"{addresses.DEFAULT_URL} was not tried"):
        client.gpus()
    (system / "worker").mkdir()
    (system / "worker" / "environment").touch()
    with Client() as client, pytest.raises(DaemonUnavailable) as failed:
        client.gpus()
    assert "This host is a node of a daemon elsewhere" in (failed.value.remedy or "")
    (tmp_path / "home" / "gpulease").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(tmp_path / "home" / "gpulease" / "gpulease.sock"))
        assert [one.url for one in addresses.candidates(None, environ)] == [
            f"unix://{tmp_path}/home/gpulease/gpulease.sock",
            f"unix://{system}/gpulease.sock",
        ]


def test_a_user_namespace_shows_no_user_and_a_port_of_another_network_no_owner(monkeypatch, daemon, gpus: Ask) -> None:
    monkeypatch.setattr(server_owner, "owner_of_server", lambda peer, own: None)
    with pytest.raises(DaemonUnavailable, match="the kernel does not show who serves it; nothing was sent to it"):
        gpus(daemon.url)
    assert daemon.request_lines == []
    monkeypatch.setenv("GPULEASE_DAEMON_USER", "*")
    assert gpus(daemon.url) == ()


def test_a_socket_of_an_unmapped_user_counts_where_no_one_else_can_put_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server_owner, "is_overflow_uid", lambda uid: uid == 65534)
    monkeypatch.setattr(server_owner, "unix_peer", lambda sock: (1, 65534, 65534))
    place = tmp_path / "run" / "gpulease.sock"
    place.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(str(place))
        listener.listen()
        caller.connect(str(place))
        assert server_uid(caller) == os.geteuid()
        place.parent.chmod(0o1777)
        assert server_uid(caller) is None


def test_a_worker_takes_no_orders_over_plain_http_from_another_host(monkeypatch, tmp_path: Path) -> None:
    def settings(url: str, plain_http: bool = False) -> WorkerSettings:
        return WorkerSettings(url=url, data_dir=tmp_path, simulate="1", plain_http=plain_http)

    with pytest.raises(InvalidRequest, match="plain HTTP to another host"):
        _ = settings("https://one.example:1,http://192.0.2.1:8750").urls
    assert settings("http://192.0.2.1:8750", plain_http=True).urls
    assert settings("https://192.0.2.1:8750,http://127.0.0.1:8750,http://localhost:1,unix:///run/x").urls

    # A name of this host may lead to another one.
    monkeypatch.setattr(server_check, "is_on_this_host", lambda connection: False)
    monkeypatch.setattr(server_check, "server_uid", lambda connection: None)
    reached: Any = SimpleNamespace()
    places = addresses.candidates("http://localhost:1")
    with pytest.raises(NotTrusted, match="it is on another host, and plain HTTP"):
        server_check.check_server(reached, Destination(places, True, None, 1.0, obeys=True, plain_http=False))
    server_check.check_server(reached, Destination(places, True, None, 1.0))


@AS_ANOTHER_USER
def test_a_worker_takes_no_orders_from_another_user(monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setattr(server_owner, "owner_of_system_data_dir", lambda: EVE)  # whom a client would believe
    with Squatter(("127.0.0.1", 0), tmp_path / "record") as eve:
        url = f"http://127.0.0.1:{eve.port}"

        async def work() -> None:
            loop = WorkerLoop(WorkerSettings(url=url, node="n", data_dir=tmp_path, simulate="1", token=TOKEN))
            running = asyncio.create_task(loop.run())
            said = lambda: f"served by user {EVE}" in caplog.text  # noqa: E731
            await asyncio.to_thread(eventually, said, 60)
            running.cancel()
            await asyncio.wait({running})

        asyncio.run(work())
        eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


def test_a_server_that_hangs_up_at_once_is_no_stranger(gpus: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(DaemonUnavailable) as failed:
            gpus(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
    assert "does not show" not in str(failed.value)


def test_a_connection_that_was_reset_meanwhile_is_not_one() -> None:
    """It has no other end any more: an error that a worker would take for one of its data directory, and end."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        places = addresses.parse(f"http://127.0.0.1:{server.getsockname()[1]}")

        def is_reset() -> bool:
            try:
                ours.getpeername()
            except OSError:
                return True
            return False

        eventually(is_reset, 30)
        with pytest.raises(NotConnected, match="it hung up at once"):
            server_check.check_server(ours, Destination(places, True, None, 1.0))


def test_a_closed_port_is_still_a_refused_connection(gpus: Ask) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(DaemonUnavailable, match="Connection refused"):
            gpus(f"http://127.0.0.1:{reserved.getsockname()[1]}")
