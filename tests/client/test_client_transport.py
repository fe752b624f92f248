from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpulease import (
    AsyncClient,
    Client,
    DaemonUnavailable,
    GpuleaseError,
    InvalidRequest,
    LeaseRequest,
    NotFound,
    Unavailable,
)
from gpulease.sansio import flows
from gpulease.sansio.direct_http import NO_WAIT_S, ArrivingResponse, DirectHttp
from gpulease.sansio.effects import Attempt, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease.sansio.httpx_connection import HttpxConnection
from gpulease_protocol import endpoints
from gpulease_protocol.host.addresses import candidates, parse, unix
from gpulease_protocol.model import Job, JobState, Launcher
from tests.client.fake_daemon import FakeDaemon
from tests.client.stalls import stalls
from tests.ports import free_port


def once(fault: str, part: str) -> Callable[[str], str | None]:
    """A fault for the first request line that contains `part`."""
    left = [fault]
    return lambda line: left.pop() if left and part in line else None


@pytest.mark.alone
def test_without_a_daemon_the_error_names_addresses_and_remedy_within_2_s() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with stalls() as stalled_s:
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="Check the address") as refused:
            Client(url).gpus()
        assert time.monotonic() - begun < 2 + stalled_s()
    assert url in str(refused.value)


def test_a_request_whose_response_was_lost_is_retried_and_granted_once(daemon: FakeDaemon, client: Client) -> None:
    client.gpus()
    daemon.fault = once("break", "POST /v1/leases")
    lease = client.request_lease(LeaseRequest(count=1))
    assert daemon.count("POST /v1/leases") == 2
    assert list(daemon.leases) == [lease.id]


def test_a_renewal_whose_response_was_lost_is_retried(daemon: FakeDaemon, client: Client) -> None:
    lease = client.request_lease(LeaseRequest(count=1))
    daemon.fault = once("break", "renew")
    assert client.renew(lease.id, lease.fencing_token).id == lease.id
    assert daemon.count("renew") == 2


def test_a_daemon_that_cannot_commit_is_retried(daemon: FakeDaemon, client: Client) -> None:
    client.gpus()
    daemon.fault = once("503", "/v1/gpus")
    assert client.gpus() == ()


@pytest.mark.alone
def test_an_endless_outage_is_not_retried_forever(daemon: FakeDaemon, client: Client) -> None:
    client.gpus()
    daemon.fault = lambda line: "503"
    with stalls() as stalled_s:
        begun = time.monotonic()
        with pytest.raises(Unavailable):
            client.gpus()
        assert time.monotonic() - begun < 2 + stalled_s()


@pytest.mark.alone
def test_an_outage_is_waited_out_no_longer_than_the_wait_lasts(daemon: FakeDaemon) -> None:
    with stalls() as stalled_s, Client(daemon.url) as client:
        client.gpus()
        daemon.stop()
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            client.lease(1, wait_s=1.5)
        assert time.monotonic() - begun < 8 + stalled_s(), "not retry_s, which is 30 s"


def test_a_restart_of_the_daemon_during_a_wait_is_survived(daemon: FakeDaemon, client: Client, until) -> None:
    daemon.free = False
    held: list[object] = []
    waiter = threading.Thread(target=lambda: held.append(client.lease(1, wait_s=60)))
    waiter.start()
    until(lambda: daemon.count("wait_while=queued") == 1)
    daemon.stop()
    daemon.start()
    until(lambda: daemon.count("wait_while=queued") >= 2)
    daemon.grant("L-1")
    waiter.join(30)
    assert held
    held[0].release()  # type: ignore[attr-defined]


@pytest.mark.parametrize("failures", [["503", "break", "503"], ["404", "html", "500"]], ids=["bare", "behind a proxy"])
def test_a_wait_for_a_job_survives_a_restart_of_the_daemon_in_which_it_begins(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, failures: list[str]
) -> None:
    """As the waits of a second that `gpulease wait` makes while the job is in the queue."""
    monkeypatch.setattr(flows, "RETRY_S", 0.0)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    words = {"command": ("true",), "launcher": Launcher.PLAIN, "created_at": at}
    daemon.jobs["job-1"] = Job(id="job-1", state=JobState.QUEUED, lease_id="lease-1", **words)
    failures = failures.copy()
    with Client(daemon.url) as client:
        assert client.wait_job("job-1", 0.0).state is JobState.QUEUED
        daemon.fault = lambda line: failures.pop() if failures and "/v1/jobs/" in line else None
        assert client.wait_job("job-1", 0.0).state is JobState.QUEUED
    assert not failures


@pytest.mark.alone
def test_a_daemon_that_never_responds_times_out(daemon: FakeDaemon) -> None:
    daemon.fault = lambda line: "hang"
    with stalls() as stalled_s:
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match=r"did not answer GET /v1/gpus within 0\.2 s"):
            Client(daemon.url, timeout_s=0.2).gpus()
        assert time.monotonic() - begun < 1.5 + stalled_s()


@pytest.mark.parametrize("arrived", [True, False])
def test_what_has_arrived_in_time_is_read_late(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    client.gpus()
    next_chunk, chunks = ArrivingResponse.next_chunk, [b"{", b'"items": [], "next": null}', None]

    def slow(response: ArrivingResponse) -> bytes | None:
        time.sleep(0.3)  # as another thread that keeps the GIL
        if response._connection.gettimeout() == NO_WAIT_S and not arrived:
            raise ResponseLost("timed out", timed_out=True)
        return next_chunk(response) if arrived else chunks.pop(0)

    monkeypatch.setattr(ArrivingResponse, "next_chunk", slow)
    call = endpoints.gpus()
    if arrived:
        client.send(call, retry_s=0, timeout_s=0.2)
    else:
        with pytest.raises(DaemonUnavailable, match="within"):
            client.send(call, retry_s=0, timeout_s=0.2)


def test_a_call_during_close_in_another_thread_opens_a_new_connection(daemon, client, monkeypatch) -> None:
    client.gpus()
    send = DirectHttp.send

    def close_and_send(connections: DirectHttp, attempt: Attempt) -> object:
        monkeypatch.undo()
        client.close()
        return send(connections, attempt)

    monkeypatch.setattr(DirectHttp, "send", close_and_send)
    assert client.gpus() == ()


def test_concurrent_first_calls_leave_no_connection_open(daemon, monkeypatch) -> None:
    threads, opened = 8, []
    gate = threading.Barrier(threads)
    build, connect = DirectHttp.__init__, socket.create_connection

    def build_together(connections: DirectHttp, *parts: Any) -> None:
        gate.wait(60)  # every thread has seen that there are none yet
        build(connections, *parts)

    def connect_and_note(*where: Any) -> socket.socket:
        opened.append(connect(*where))
        return opened[-1]

    monkeypatch.setattr(DirectHttp, "__init__", build_together)
    monkeypatch.setattr(socket, "create_connection", connect_and_note)
    with Client(daemon.url) as shared:
        calls = [threading.Thread(target=shared.gpus) for _ in range(threads)]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
        assert daemon.count("/v1/gpus") == threads
    assert 0 < len(opened) <= threads
    assert {one.fileno() for one in opened} == {-1}


@pytest.mark.parametrize("connection", [DirectHttp, HttpxConnection])
def test_a_client_that_is_forgotten_closes_its_connections(daemon, monkeypatch, connection: type) -> None:
    monkeypatch.setattr("gpulease.sansio.sync_transport._connections", connection)
    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert Client(daemon.url).gpus() == ()
        gc.collect()
    assert [str(one.message) for one in warned if issubclass(one.category, ResourceWarning)] == []


def test_a_connection_opened_during_close_is_closed_after_its_response(daemon, client, monkeypatch) -> None:
    sockets = []
    connect = socket.create_connection

    def connect_and_close(*where: Any, **options: Any) -> socket.socket:
        sockets.append(connect(*where, **options))
        client.close()
        return sockets[-1]

    monkeypatch.setattr(socket, "create_connection", connect_and_close)
    assert client.gpus() == ()
    assert [one.fileno() for one in sockets] == [-1]


def test_a_response_of_another_program_is_an_error_that_names_the_address(daemon: FakeDaemon, client: Client) -> None:
    daemon.fault = lambda line: "html"
    with pytest.raises(GpuleaseError, match=daemon.url):
        client.gpus()


def test_an_unknown_id_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound):
        client.lease_by_id("../../nothing?x#y")


def test_a_log_stream_that_breaks_off_is_resumed(daemon: FakeDaemon, client: Client) -> None:
    daemon.fault = once("cut", "/logs")
    assert "".join(client.job_logs("j", follow=True)) == "one\ntwo\n"
    assert daemon.count("/logs") == 2


@pytest.mark.parametrize("fault", ["404", "html"])
def test_a_stream_goes_on_after_an_answer_of_a_proxy(daemon: FakeDaemon, client: Client, fault: str) -> None:
    daemon.fault = once(fault, "/logs")
    client.alive()
    assert "".join(client.job_logs("j", follow=True)) == "one\ntwo\n"
    daemon.fault = lambda line: fault if "/v1/events" in line else None
    with Client(daemon.url, retry_s=0.2) as watching:
        watching.alive()
        with pytest.raises(Unavailable, match=daemon.url):
            next(watching.watch_events(0))
    assert daemon.count("/v1/events") > 1


def test_a_log_cut_inside_a_character_is_reassembled(daemon: FakeDaemon, client: Client) -> None:
    daemon.logs = ["ä".encode()[:1], "ä".encode()[1:]]
    daemon.fault = once("cut", "/logs")
    assert "".join(client.job_logs("j")) == "ä"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_connections(daemon: FakeDaemon, client: Client) -> None:
    client.gpus()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if client.gpus() == () else 1
        finally:
            os._exit(code)
    assert client.gpus() == ()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("reused", [True, False])
def test_a_process_that_closes_all_descriptors_and_opens_files_keeps_these(
    daemon: FakeDaemon, client: Client, tmp_path: Path, reused: bool
) -> None:
    client.gpus()
    ((idle, _),) = next(iter(client._transport._connections.values()))._idle
    number = idle.fileno()
    checkpoint = os.open(tmp_path / "checkpoint", os.O_RDWR | os.O_CREAT)
    if reused:
        os.dup2(checkpoint, number)
    else:
        os.close(number)
    assert client.gpus() == ()
    client.close()
    if reused:
        assert os.write(number, b"weights") == 7, "no client closes what is not its own"
        os.close(number)
        assert (tmp_path / "checkpoint").read_bytes() == b"weights"
    os.close(checkpoint)


@pytest.mark.parametrize(
    "url", ["ftp://host", "127.0.0.1", "http://", "unix://relative", "unix:", "http://h:port", "http://h?x=1"]
)
def test_an_invalid_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:8750"):
        Client(url)


def test_addresses_come_from_argument_environment_or_local_sockets(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gpulease_protocol.host.addresses.SYSTEM_DATA_DIR", tmp_path / "none")
    place = tmp_path / "gpulease"
    place.mkdir()
    environ = {"GPULEASE_URL": "http://b:1", "XDG_DATA_HOME": str(tmp_path)}
    assert [address.url for address in candidates("http://a:1", environ)] == ["http://a:1"]
    assert [address.url for address in candidates(None, environ)] == ["http://b:1"]
    assert [address.url for address in candidates(None, {})][-1] == "http://127.0.0.1:8750"


def test_a_socket_without_a_listener_is_skipped(daemon: FakeDaemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "gpulease.sock"))
    places = (unix(tmp_path / "gpulease.sock"), parse(daemon.url))
    with Client.for_destination(
        Destination(places, interchangeable=False, bearer_token=None, timeout_s=30.0)
    ) as client:
        assert client.gpus() == ()


def test_a_response_that_is_closed_twice_lends_its_connection_to_one_call_at_a_time(daemon) -> None:
    destination = Destination.of(daemon.url, None, 60)
    address = destination.addresses[0]
    connections = DirectHttp(address, destination)
    attempt = Attempt(address, endpoints.gpus(), timeout_s=60, connect_timeout_s=60, check_listening=False)
    response = connections.send(attempt)
    while response.next_chunk() is not None:
        pass
    response.close()
    response.close()
    at_once = [connections.send(attempt) for _ in range(2)]
    assert all(one.next_chunk() for one in at_once)
    for one in at_once:
        one.close()
    connections.close()


@pytest.mark.parametrize("kind", ["direct", "httpx", "async"])
def test_no_request_is_logged_into_the_log_of_the_user(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def ask() -> None:
        async with AsyncClient(daemon.url) as client:
            await client.gpus()

    if kind == "httpx":
        monkeypatch.setattr("gpulease.sansio.sync_transport._connections", HttpxConnection)
    with caplog.at_level(logging.INFO):
        if kind == "async":
            asyncio.run(ask())
        else:
            with Client(daemon.url) as client:
                client.gpus()
        assert daemon.count("/v1/gpus") == 1
        assert not caplog.records
        httpx2.get(f"{daemon.url}/v1/gpus")
        assert "HTTP Request: GET" in caplog.text, "requests of others are logged as before"


def test_a_client_that_was_used_is_pickled_for_another_process(daemon: FakeDaemon, client: Client) -> None:
    daemon.gpus = []
    assert client.gpus() == ()
    with pickle.loads(pickle.dumps(client)) as copy:
        assert copy.gpus() == ()
        assert repr(copy) == repr(client)


@pytest.mark.alone
def test_a_network_that_loses_the_first_packet_to_another_host_is_no_missing_daemon() -> None:
    """The kernel sends it again after 1 s. A full listener loses it in the same way."""
    with closing(socket.create_server(("127.0.0.2", 0), backlog=0)) as listener, ExitStack() as others:
        place = listener.getsockname()
        full = [others.enter_context(closing(socket.socket())) for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(place)

        def serve() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    with listener.accept()[0] as connection, suppress(TimeoutError):
                        connection.settimeout(0.2)
                        if connection.recv(65536):
                            connection.sendall(
                                b'HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{"items": [], "next": null}'
                            )

        timer = threading.Timer(0.5, serve)
        timer.daemon = True
        timer.start()
        with Client(f"http://127.0.0.2:{place[1]}", retry_s=0.0) as client:
            assert client.gpus() == ()
