"""The daemons that a worker may report to, and which of them is asked: the one that serves.

Several are ways to one service: one writes to the database, the others stand by and answer 503, and one of those takes
over. The one that answered is kept until it does not. One that said nothing in time is left alone for a while, as long
as any other answers at all: a daemon that is stopped still accepts what is sent to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import httpx2

ANSWER_S = 10.0
"""How long an answer may take over the time that the daemon may hold it."""
ANSWER_OF_SEVERAL_S = 2.0
"""The same where another daemon may take over."""
AVOID_S = 4.0
"""How long one that was late is not asked while another one answers."""
UNIX = "unix://"


class Daemons:
    """Connections to the daemons at `urls`, while entered. `token` is sent to those that do not know this host."""

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self._urls = tuple(urls)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._stack = AsyncExitStack()
        self._clients: dict[str, httpx2.AsyncClient] = {}
        self._avoided: dict[str, float] = {}
        self._first = 0

    async def __aenter__(self) -> Self:
        for url in self._urls:
            self._clients[url] = await self._stack.enter_async_context(open_client(url))
            self._clients[url].headers.update(self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def shown(self) -> str:
        """Where they are, in words."""
        return " or ".join(self._urls)

    async def post(self, path: str, body: Any, hold_s: float) -> httpx2.Response:
        """The answer of the one that serves, by one round through all. `hold_s` is how long it may hold its answer.

        Raises httpx2's errors, or ValueError with what the last one said.
        """
        limit_s = hold_s + (ANSWER_S if len(self._urls) == 1 else ANSWER_OF_SEVERAL_S)
        failures: list[Exception] = []
        for url in self._round(failures):
            try:
                answer = await self._clients[url].post(path, json=body, timeout=limit_s)
                if answer.status_code == httpx2.codes.OK:
                    self._first = self._urls.index(url)
                    self._avoided.pop(url, None)
                    return answer
                raise ValueError(f"the daemon answered {answer.status_code}: {answer.text[:300]}")
            except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
                self._avoided[url] = time.monotonic() + AVOID_S
                failures.append(error)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                failures.append(error)
        raise failures[0] if len(failures) == 1 else ValueError("; ".join(map(_told, failures)))

    def _round(self, failures: Sequence[Exception]) -> Iterator[str]:
        order = self._urls[self._first :] + self._urls[: self._first]
        now_s = time.monotonic()
        avoided = {url for url in order if self._avoided.get(url, now_s) > now_s and len(order) > 1}
        yield from (url for url in order if url not in avoided)
        if not any(isinstance(failure, ValueError) for failure in failures):
            yield from avoided


def open_client(url: str) -> httpx2.AsyncClient:
    """A client for `http://HOST:PORT` or `unix:///PATH`. Proxies of the environment do not concern it."""
    if url.startswith(UNIX):
        transport = httpx2.AsyncHTTPTransport(uds=url.removeprefix(UNIX))
        return httpx2.AsyncClient(transport=transport, base_url="http://gpulease", trust_env=False)
    # Certificates are the system's, or those of SSL_CERT_FILE.
    secure = httpx2.create_ssl_context() if url.startswith("https:") else False
    return httpx2.AsyncClient(base_url=url, verify=secure, trust_env=False)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
