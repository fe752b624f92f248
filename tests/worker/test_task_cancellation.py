from __future__ import annotations

import asyncio

import pytest

from gpulease_worker.task_cancellation import cancel_and_wait


async def refuses_for_a_while(refused: asyncio.Event, may_end: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        refused.set()
        await may_end.wait()
        raise


def test_a_worker_cancelled_while_it_cancels_a_request_ends() -> None:
    """Its own end was once taken for that of the request, and a daemon's next worker found the place taken."""

    async def scenario() -> None:
        refused, may_end = asyncio.Event(), asyncio.Event()
        request = asyncio.create_task(refuses_for_a_while(refused, may_end))
        await asyncio.sleep(0)
        worker = asyncio.create_task(cancel_and_wait(request))
        await refused.wait()
        worker.cancel()  # what SIGTERM does
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await worker

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("error", [None, OSError("no")])
def test_the_result_of_a_cancelled_task_is_dropped(error: Exception | None) -> None:
    async def ends() -> None:
        if error:
            raise error

    async def scenario() -> None:
        task = asyncio.create_task(ends())
        await asyncio.sleep(0)
        await cancel_and_wait(task)
        assert task.done()

    asyncio.run(scenario())
