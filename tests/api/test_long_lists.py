"""Lists that may be long: the bytes of a page, made in slices, of one moment."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from fastapi import Request
from pydantic import TypeAdapter

from gpulease_protocol.limits import LimitUse
from gpulease_protocol.model import Gpu, GpuState, Lease, Node, Page
from gpulease_server.api import long_lists
from gpulease_server.api.long_lists import list_response
from gpulease_server.api.middleware import etag
from gpulease_server.api.pages import page_response
from gpulease_server.core.limit_changes import limit_list, limit_use
from gpulease_server.core.presentation import GpuList, node_list, node_view
from tests.core.build import World, gpu_views

GPU: TypeAdapter[object] = TypeAdapter(Gpu)
NODE: TypeAdapter[object] = TypeAdapter(Node)


@pytest.fixture
def world() -> World:
    """Two nodes, a lease and a request that waits."""
    world = World().node("b", gpus=3).node("a", gpus=2)
    world.lease(2, node="b")
    world.lease(3)
    return world


def test_a_list_of_gpus_is_what_a_page_of_them_would_be(world: World) -> None:
    gpus = GpuList(world.ledger, world.now, world.policy)
    answer = asyncio.run(list_response(gpus.records(), gpus.view, GPU))
    page = Page(items=tuple(gpu_views(world)))
    assert answer.body == TypeAdapter(Page[Gpu]).dump_json(page)
    assert answer.headers["content-type"] == "application/json"
    assert [(gpu.node, gpu.index) for gpu in page.items] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]


def test_a_list_of_nodes_is_what_a_page_of_them_would_be(world: World) -> None:
    answer = asyncio.run(list_response(*node_list(world.ledger, world.now, world.policy), NODE))
    nodes = (node_view(world.ledger, world.ledger.nodes[name], world.now, world.policy) for name in "ab")
    assert answer.body == TypeAdapter(Page[Node]).dump_json(Page(items=tuple(nodes)))


def test_a_list_of_limits_is_what_a_page_of_them_would_be_and_shows_one_moment(world: World) -> None:
    world.limit("ann", max_gpus=4, gpu_hours=10.0)
    world.limit("vision", "group", members=("ann", "bob"), max_leases=2)
    index, now, defaults = world.ledger.limits, world.now, world.policy.limits
    keys = sorted(index.records)
    view = limit_list(index, defaults, now)
    page = Page(items=tuple(limit_use(index, key, defaults, now) for key in keys))
    world.limit("vision", "group")
    world.lease(1, user="ann")
    world.at_s += 100.0
    answer = asyncio.run(list_response(keys, view, TypeAdapter(LimitUse)))
    assert answer.body == TypeAdapter(Page[LimitUse]).dump_json(page)
    assert [one.gpus for one in page.items] == [2, 2]


@pytest.mark.parametrize("number", [None, 7])
def test_a_page_that_is_made_in_slices_is_what_it_would_be_in_one_piece(world: World, number: int | None) -> None:
    leases = [record.lease for record in world.ledger.leases.values()]
    request = Request({"type": "http", "path": "/v1/leases", "query_string": b"limit=2", "headers": []})
    answer = asyncio.run(page_response(request, leases, lambda lease: lease, TypeAdapter(Lease), number))
    page = Page(items=tuple(leases), next=None if number is None else str(number))
    assert answer.body == TypeAdapter(Page[Lease]).dump_json(page)
    link = None if number is None else '</v1/leases?limit=2&cursor=7>; rel="next"'
    assert answer.headers.get("link") == link


def test_an_empty_list_is_an_empty_page() -> None:
    empty = World()
    answer = asyncio.run(list_response(*node_list(empty.ledger, empty.now, empty.policy), NODE))
    assert answer.body == b'{"items":[],"next":null}'


def test_others_run_while_a_long_list_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each item takes 1 ms."""
    ticks = itertools.count()
    monkeypatch.setattr(long_lists.time, "perf_counter", lambda: next(ticks) / 1000)
    (gpu, *_), at = gpu_views(world), list[int]()
    done = asyncio.Event()

    async def make() -> None:
        def view(number: int) -> Gpu:
            at.append(number)
            return gpu

        await list_response(range(100), view, GPU)
        done.set()

    async def look() -> list[int]:
        making, seen = asyncio.create_task(make()), []
        while not done.is_set():
            seen.append(len(at))
            await asyncio.sleep(0)
        await making
        return seen

    seen = asyncio.run(look())
    assert max(later - earlier for earlier, later in itertools.pairwise([*seen, 100])) <= 4


def test_a_list_shows_the_moment_at_which_it_was_asked_for(world: World) -> None:
    gpus = GpuList(world.ledger, world.now, world.policy)
    records, show = node_list(world.ledger, world.now, world.policy)
    before = [gpus.view(gpu) for gpu in gpus.records()], [show(node) for node in records]
    world.lease(1, node="b")
    world.at_s += 100.0
    world.node("a", gpus=1)
    world.cordon(1, "b")
    assert ([gpus.view(gpu) for gpu in gpus.records()], [show(node) for node in records]) == before
    assert GpuState.LEASED in {gpu.state for gpu in before[0]}


def test_the_tag_of_an_answer_is_the_same_in_one_piece_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = etag.tag_of(b"abcdefg")
    monkeypatch.setattr(etag, "PIECE_BYTES", 2)
    assert asyncio.run(etag._tag_of_long(b"abcdefg")) == whole
    assert asyncio.run(etag._tag_of_long(b"")) != whole
