"""Lists that may be long: they are made in slices, between which the event loop runs.

`GET /v1/gpus` of 10,000 GPUs takes 0.2 s of computing, a page of 1,000 leases 30 ms. In one piece, no renewal and no
report would be answered in that time. The records that a list shows are copied first (`core.presentation.GpuList`), so
that it shows one moment although the ledger goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from fastapi import Response
from pydantic import TypeAdapter

SLICE_S = 0.003
"""For about so long a list is made without letting anything else run."""

Record = TypeVar("Record")
Shown = TypeVar("Shown")


async def list_response(
    records: Iterable[Record], view: Callable[[Record], object], adapter: TypeAdapter[object]
) -> Response:
    """The answer with a noun for each record, in one page."""
    return Response(await list_json(records, view, adapter), media_type="application/json")


async def list_json(
    records: Iterable[Record],
    view: Callable[[Record], object],
    adapter: TypeAdapter[object],
    cursor: str | None = None,
) -> bytes:
    """A noun for each record, in a page that continues at this cursor: what `Page` would be as JSON."""
    items = b",".join(await in_slices(records, lambda record: adapter.dump_json(view(record), by_alias=True)))
    return b'{"items":[%b],"next":%b}' % (items, b"null" if cursor is None else b'"%b"' % cursor.encode())


async def in_slices(records: Iterable[Record], view: Callable[[Record], Shown]) -> list[Shown]:
    """What `view` makes of each record, in slices."""
    found: list[Shown] = []
    begun_s = time.perf_counter()
    for record in records:
        found.append(view(record))
        if time.perf_counter() - begun_s > SLICE_S:
            await asyncio.sleep(0)
            begun_s = time.perf_counter()
    await asyncio.sleep(0)  # to join them may take as long as a slice
    return found
