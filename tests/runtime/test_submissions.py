"""The writer's queue: what arrives together is decided together, and no one waits for more than that."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpulease_server.core.happenings import Ticked
from gpulease_server.runtime.submissions import Submission, SubmissionQueue


def submission(number: int) -> Submission:
    return Submission(Ticked(cause=str(number), since_last_s=0.0, stalled_s=0.0), None)


async def arrive(queue: SubmissionQueue, number: int, rounds: int) -> None:
    """Put so many, one after each so many rounds of the event loop."""
    for one in range(number):
        for _ in range(rounds):
            await asyncio.sleep(0)
        queue.put(submission(one))


async def taken_after_wait(number: int, rounds: int) -> int:
    """How many the reader has when its wait ends, if so many arrive."""
    queue = SubmissionQueue()
    arriving = asyncio.create_task(arrive(queue, number, rounds))
    await queue.wait(10.0)
    taken = queue.take(1000)
    arriving.cancel()
    return len(taken)


@pytest.mark.parametrize("rounds", [1, 2])
def test_requests_that_arrive_in_rounds_of_the_event_loop_that_follow_share_a_turn(rounds: int) -> None:
    assert asyncio.run(taken_after_wait(20, rounds)) == 20


def test_a_turn_begins_though_requests_never_cease() -> None:
    assert 1 < asyncio.run(taken_after_wait(100_000, rounds=1)) < 100


def test_a_request_does_not_wait_for_one_that_comes_later() -> None:
    assert asyncio.run(taken_after_wait(2, rounds=10)) == 1


def test_a_wait_ends_where_nothing_arrives() -> None:
    begun_s = time.monotonic()
    asyncio.run(SubmissionQueue().wait(0.01))
    assert time.monotonic() - begun_s >= 0.009
