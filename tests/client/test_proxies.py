"""The proxies of the environment, on the way to a daemon on another host."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.tokens import TokenRequest

NO_DAEMON = "https://127.0.0.2:9"
"""Another host, as addresses go, which refuses connections."""
Ask = Callable[[], Any]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all", "no"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Asks the daemon for a token, which it is not to do twice."""

    def call() -> Any:
        if request.param == "Client":
            with Client(NO_DAEMON, retry_s=0.0) as client:
                return client.create_token(TokenRequest(user="ada"))

        async def work() -> Any:
            async with AsyncClient(NO_DAEMON, retry_s=0.0) as client:
                return await client.create_token(TokenRequest(user="ada"))

        return asyncio.run(work())

    return call


@pytest.fixture
def forbidding() -> Iterator[str]:
    """A proxy that lets no one through, as those of companies do with addresses inside."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_a_proxy_in_the_way_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(DaemonUnavailable, match=f"; through the proxy of {variable.upper()}, as NO_PROXY does not"):
        ask()


def test_what_a_proxy_has_refused_to_connect_was_not_sent(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, forbidding: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", forbidding)
    with pytest.raises(DaemonUnavailable, match="403 Forbidden; through the proxy of HTTPS_PROXY"):
        ask()


@pytest.mark.parametrize(("proxy", "why"), [("socks5://127.0.0.1:9", "socksio"), ("socks://127.0.0.1:9", "neither")])
def test_a_proxy_that_cannot_be_used_is_refused_in_words(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, proxy: str, why: str
) -> None:
    """`ssh -D` is used with the first, GNOME sets the second."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(InvalidRequest, match=rf"\(ALL_PROXY\) cannot be used: .*{why}") as refused:
        ask()
    assert "Add 127.0.0.2 to NO_PROXY" in refused.value.remedy
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.2")
    with pytest.raises(DaemonUnavailable, match=re.escape(f"{NO_DAEMON} (")) as not_there:
        ask()
    assert "proxy" not in str(not_there.value)
