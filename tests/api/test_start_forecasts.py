"""What a forecast costs those who do not ask for one, and how often it is made."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_protocol.model import ExpectedBasis
from gpulease_server.api import start_forecasts
from gpulease_server.api.start_forecasts import (
    BUDGET_S,
    MAX_PAUSE_S,
    MAX_STALE_S,
    PAUSE_FACTOR,
    RANGES_KEPT_S,
    StartForecasts,
)
from gpulease_server.core.forecast.expected_start import ExpectedStart, StartForecast
from gpulease_server.core.forecast.lease_history import MIN_SAMPLES
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import World
from tests.core.test_expected_range import lasted


class Forecasts:
    """A world in which a request waits for a GPU that is held for an hour, and what is said of it; a forecast takes
    `takes_s` of a clock of its own, and finds nothing while `finds` is false."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World().node(gpus=1)
        self.world.lease(time_s=3600, ttl_s=1e5)
        self.waiting = self.world.lease(ttl_s=1e5).id
        self.made = 0
        self.computing, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.ranges_go_on = threading.Event()
        self.ranges_go_on.set()
        self.takes_s, self.finds, self.fails = 0.0, True, False
        self.computed_s = 0.0
        self.collects: list[bool] = []
        self._forecasts, self._steps = StartForecasts(), StartForecast.steps

        def steps(forecast: StartForecast) -> Iterator[None]:
            return self.steps(forecast)

        monkeypatch.setattr(StartForecast, "steps", steps)
        monkeypatch.setattr(start_forecasts, "MAX_WAIT_S", 60.0)
        monkeypatch.setattr(start_forecasts, "time", SimpleNamespace(perf_counter=lambda: self.computed_s))

    def steps(self, forecast: StartForecast) -> Iterator[None]:
        self.made += 1
        self.collects.append(gc.isenabled())
        self.computing.set()
        assert self.go_on.wait(60)
        self.computed_s += self.takes_s
        if self.fails:
            raise ZeroDivisionError
        yield
        for _ in self._steps(forecast) if self.finds else ():
            yield
            assert forecast.declared is None or self.ranges_go_on.wait(60)

    async def ask(self, ledger: Any = None) -> dict[str, ExpectedStart]:
        """What is known, after something has happened."""
        self.world.ledger.next_seq += 1
        ledger = ledger or self.world.ledger
        return dict(await self._forecasts.expected_starts(ledger, self.world.now, self.world.policy))

    async def made_up(self) -> None:
        """Wait until none is under way."""
        if (making := self._forecasts._making) is not None:
            await making

    async def made_after(self, seconds: float) -> int:
        """How many were made once someone has asked so much later."""
        self.world.at_s += seconds
        await self.ask()
        await self.made_up()
        return self.made


Story = Callable[[Forecasts], Coroutine[Any, Any, None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def main() -> None:
            async with asyncio.timeout(60):
                await story(Forecasts(monkeypatch))

        asyncio.run(main())

    return run


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_it_is_made(play: Callable[[Story], None], *, fails: bool) -> None:
    async def story(here: Forecasts) -> None:
        here.fails = fails
        await here.ask()
        assert (here.collects, gc.isenabled()) == ([False], True)

    play(story)


def test_who_asks_while_one_is_made_gets_the_last_one_unless_it_is_old(play: Callable[[Story], None]) -> None:
    async def story(here: Forecasts) -> None:
        assert set(await here.ask()) == {here.waiting}
        for age_s, waits in ((MAX_STALE_S - 1, False), (MAX_STALE_S + 1, True)):
            here.world.at_s += age_s
            here.world.report()
            here.go_on.clear()
            here.computing.clear()
            first = asyncio.create_task(here.ask())
            await asyncio.to_thread(here.computing.wait, 60)
            second = asyncio.create_task(here.ask())
            for _ in range(5):
                await asyncio.sleep(0)
            assert second.done() is not waits
            assert not first.done()
            here.go_on.set()
            assert set(await first) == set(await second) == {here.waiting}
            await here.made_up()
        assert here.made == 3

    play(story)


def test_who_has_been_told_ranges_by_history_does_not_wait_for_the_next_ones_unless_they_are_old(
    play: Callable[[Story], None],
) -> None:
    async def story(here: Forecasts) -> None:
        here.world = World().node(gpus=1)
        lasted(here.world, *[600.0] * MIN_SAMPLES)
        here.world.lease(ttl_s=1e7)
        by_history = here.world.lease(ttl_s=1e7).id
        for age_s, waits in ((0, True), (MAX_STALE_S - 1, False), (MAX_STALE_S + 1, True)):
            here.world.at_s += age_s
            here.world.report()
            here.computing.clear()
            here.ranges_go_on.clear()
            asking = asyncio.create_task(here.ask())
            await asyncio.to_thread(here.computing.wait, 60)
            done, _ = await asyncio.wait([asking], timeout=0.2 if waits else 30)
            assert bool(done) is not waits
            here.ranges_go_on.set()
            assert {one: start.basis for one, start in (await asking).items()} == {by_history: ExpectedBasis.HISTORY}
            await here.made_up()
        here.world.at_s += RANGES_KEPT_S - 1
        here.world.report()
        here.ranges_go_on.clear()
        assert set(await here.ask()) == {by_history}
        await here.made_up()
        assert here.made == 4

    play(story)


def test_it_goes_on_where_who_asked_has_gone(play: Callable[[Story], None]) -> None:
    async def story(here: Forecasts) -> None:
        here.go_on.clear()
        gone = asyncio.create_task(here.ask())
        await asyncio.to_thread(here.computing.wait, 60)
        gone.cancel()
        second = asyncio.create_task(here.ask())
        await asyncio.wait({gone})
        here.go_on.set()
        assert set(await second) == {here.waiting}
        assert here.made == 1

    play(story)


@pytest.mark.parametrize("fails", [False, True])
def test_it_takes_a_tenth_of_the_time_also_where_it_fails(play: Callable[[Story], None], *, fails: bool) -> None:
    async def story(here: Forecasts) -> None:
        here.takes_s, here.fails = 0.5, fails
        whole_s = 0.5 * (1 + PAUSE_FACTOR)
        assert [await here.made_after(seconds) for seconds in (0, whole_s - 0.1, 0.2, whole_s + 0.1)] == [1, 1, 2, 3]

    play(story)


def test_where_all_of_its_time_finds_nothing_it_rests_longer_each_time(play: Callable[[Story], None]) -> None:
    async def story(here: Forecasts) -> None:
        here.takes_s, here.finds = 2 * BUDGET_S, False
        rests_s = []
        for made in range(1, 6):
            assert await here.made_after(0) == made
            rest_s = 0
            while await here.made_after(1) == made:
                rest_s += 1
            rests_s.append(rest_s)
        assert rests_s == sorted(rests_s)
        assert rests_s[-1] >= MAX_PAUSE_S > rests_s[0]

    play(story)


def test_another_ledger_is_played_only_after_a_rest(play: Callable[[Story], None]) -> None:
    """A standby loads a new one twice a second."""

    async def story(here: Forecasts) -> None:
        here.takes_s = 0.5
        await here.ask()
        assert await here.ask(copy_ledger(here.world.ledger)) == {}
        assert here.made == 1

    play(story)
