"""What a notebook shows of a client and of a lease."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from gpulease import AsyncClient, Client
from tests.client.fake_daemon import FakeDaemon


def test_a_clients_repr_shows_its_addresses_and_no_token() -> None:
    with Client(["http://a:8750", "unix:///run/g.sock"], token="secret") as client:
        assert repr(client) == "<Client of http://a:8750, unix:///run/g.sock>"
    assert repr(AsyncClient("http://a:8750", token="secret")) == "<AsyncClient of http://a:8750>"


def test_an_address_is_shown_without_the_password_in_it() -> None:
    with Client("http://ada:secret@proxy:8750") as client:
        assert repr(client) == "<Client of http://ada:...@proxy:8750>"


def test_a_leases_repr_shows_id_state_and_gpus(daemon: FakeDaemon, client: Client) -> None:
    lease = client.lease(1)
    assert repr(lease) == "<HeldLease L-1 active: a:0>"
    lease.release()
    assert repr(lease) == "<HeldLease L-1 released: a:0>"
    lost = client.lease(1)
    daemon.end(lost.id)
    lost.release()
    assert repr(lost) == "<HeldLease L-2 lost: a:0>"


def test_an_async_leases_repr_shows_the_same(daemon: FakeDaemon) -> None:
    async def work() -> str:
        async with AsyncClient(daemon.url) as client, client.lease(1) as lease:
            return repr(lease)

    assert asyncio.run(work()) == "<AsyncLease L-1 active: a:0>"


def test_a_held_lease_says_why_it_cannot_be_pickled_for_a_pool(client: Client) -> None:
    with client.lease(1) as lease, pytest.raises(TypeError, match=rf"{lease.id} .* cannot be pickled: pass on"):
        pickle.dumps(lease)
