"""Records the history of every GPU, leased or not, from the reports of nodes, and reads it.

Authority: a node's report for the reading, the daemon's wall clock for its time, the database for what is written. In
memory are the blocks that are being filled, about 13 kB for each GPU; what a block already has in the database is
read before the block is written for the first time. Writing is done once a minute, for `CHUNK` GPUs in one
transaction, in a thread.

What each failure does
----------------------
- A node, its worker, its probe or a GPU is away: that time is a gap.
- SIGKILL of the daemon: at most a minute of minutes is lost, and ten minutes of the other resolutions
  (`Resolution.save_s`). SIGTERM: nothing.
- A takeover: as SIGKILL. The new daemon goes on in the same blocks; the former one can write no more. A standby reads
  what is written.
- A write fails: tried again every minute. Of each GPU the newest `MAX_BLOCKS` blocks stay in memory.
- A damaged row: its time is a gap, and it is replaced.
- The wall clock jumps ahead: the time between is a gap. It is set back: see `history`.
- A GPU is replaced: its successor has another UUID, and a history of its own. The former one's is kept as long as any.

Size: 24 bytes for each GPU and bucket before compression, so at most 1.7 kB for a day of hours, 46 kB for a week of
quarters, 35 kB for a day of minutes (`bench/metrics.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Instant
from gpulease_server.runtime.gpu_metrics.history import Block, GpuHistory, Window, steps
from gpulease_server.runtime.gpu_metrics.time_series import DamagedSeries
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.dialects import error_message
from gpulease_server.store.gpu_metrics_table import BY_WIDTH, HOURS, QUARTERS, SECONDS, BlockRow
from gpulease_server.store.ledger_store import Store, StoreFailed

log = logging.getLogger("gpulease.metrics")

CHUNK = 200
"""The blocks of so many GPUs are written in one transaction."""
FORGET_S = 900.0
"""A GPU without a reading for this long is no longer kept in memory, once its blocks are written."""
STOP_WAIT_S = 10.0
"""How long a daemon that stops waits for a write that has begun."""

Copied = list[tuple[Block, int]]
"""Blocks of one GPU, each with the second from which on it counts."""


class HistoryRecorder:
    """The history of all GPUs. Used from the event loop only.

    Args:
        store: The ledger's database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._histories: dict[str, GpuHistory] = {}
        self._problem = ""

    def record(self, node: str, report: NodeReport, ledger: Ledger, now: Instant) -> None:
        """Record the readings of a node's report. One of a GPU that the ledger has on another node does not count."""
        at_s, on_node = int(now.at.timestamp()), ledger.fleet.gpus_of_node.get(node, {})
        for reading in report.gpus:
            uuid = reading.uuid
            if uuid not in on_node:
                continue
            history = self._histories.get(uuid)
            if history is None:
                history = self._histories[uuid] = GpuHistory()
            history.add(at_s, steps(reading))

    async def save(self, now: Instant, *, everything: bool = False) -> None:
        """Write the blocks that are due, or all that are not written yet."""
        uuids = list(self._histories)
        for place in range(0, len(uuids), CHUNK):
            some = {uuid: self._histories[uuid] for uuid in uuids[place : place + CHUNK]}
            try:
                await self._load(some, now.mono_s, everything)
                await self._save(some, now.mono_s, everything)
            except (StoreFailed, SQLAlchemyError) as error:
                detail = error.detail if isinstance(error, StoreFailed) else error_message(error)
                self._log_problem(f"the history of GPUs cannot be written: {detail} Trying again.")
                break  # the others would fail as well
            self._log_problem("")
        self._drop(uuids, now)

    async def _load(self, histories: dict[str, GpuHistory], now_s: float, everything: bool) -> None:
        """Bring the blocks up to date, and complete them with what the database has of them."""
        fresh = {}
        for uuid, history in histories.items():
            # Quarters and hours are written more seldom than minutes, so the minute that is not over is seldom added.
            seldom = [block for block in history.blocks.values() if block.resolution in (QUARTERS, HOURS)]
            due = not seldom or any([now_s - block.saved_s >= block.resolution.save_s for block in seldom])
            history.sum_up(minutes_only=not (due or everything))
            for block in history.blocks.values():
                if not block.loaded:
                    row = _row(uuid, block)
                    fresh[row.id] = (history, block, row)
        if not fresh:
            return
        rows = [row for _, _, row in fresh.values()]
        completed = {}
        for row in await asyncio.to_thread(gpu_metrics_table.load_blocks, self._store.engine, rows):
            history, block, _ = fresh[row.id]
            stored = _block(row)
            if stored is not None:
                block.merge(stored)
                completed[id(history)] = history
        for _, block, _ in fresh.values():
            block.loaded = True
        for history in completed.values():
            history.sum_up_all()
            await asyncio.sleep(0)  # a millisecond each

    async def _save(self, histories: dict[str, GpuHistory], now_s: float, everything: bool) -> None:
        due = [
            (uuid, block)
            for uuid, history in histories.items()
            for block in history.blocks.values()
            if block.unsaved
            and block.loaded
            and (everything or not history.is_current(block) or now_s - block.saved_s >= block.resolution.save_s)
        ]
        if not due:
            return
        rows = [replace(_row(uuid, block), content=block.to_bytes()) for uuid, block in due]
        for _, block in due:
            block.unsaved = False
        writing = asyncio.create_task(asyncio.to_thread(gpu_metrics_table.save_blocks, self._store, rows))
        written = False
        try:
            await asyncio.shield(writing)
            written = True
        except asyncio.CancelledError:
            # The daemon stops, and writes next what is not written. This write must not come after that one.
            await asyncio.wait({writing}, timeout=STOP_WAIT_S)
            written = writing.done() and writing.exception() is None
            raise
        finally:
            for _, block in due:
                block.unsaved = block.unsaved or not written
                block.saved_s = now_s if written else block.saved_s

    def _drop(self, uuids: Iterable[str], now: Instant) -> None:
        lost = 0
        for uuid in uuids:
            history = self._histories[uuid]
            lost += history.drop_written()
            silent_s = now.at.timestamp() - (history.last_s or 0)
            if abs(silent_s) > FORGET_S and not any(block.unsaved for block in history.blocks.values()):
                del self._histories[uuid]
        if lost:
            log.error("%d blocks of the history of GPUs are lost: they could not be written", lost)

    def copy(self, uuids: Collection[str], span: Window) -> dict[str, Copied]:
        """What is in memory of these GPUs and belongs to a window: blocks of its resolution, and the seconds that they
        do not have yet. Copies, for a thread."""
        found: dict[str, Copied] = {}
        for uuid in uuids:
            history = self._histories.get(uuid)
            if history is None:
                continue
            summed_s = history.summed_until_s(span.resolution)
            found[uuid] = [
                (_copy(block), summed_s if block.resolution is not span.resolution else 0)
                for block in list(history.blocks.values())
                if block.resolution in (span.resolution, SECONDS)
                and block.start_s < span.to_s
                and block.end_s > span.from_s
            ]
        return found

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and its end once."""
        if problem and not self._problem:
            log.error(problem)
        elif self._problem and not problem:
            log.info("the history of GPUs is written again")
        self._problem = problem


def read_blocks(store: Store, uuids: Collection[str], span: Window, copied: dict[str, Copied]) -> dict[str, Copied]:
    """The blocks of a window, those in memory and those in the database. Blocks. Raises SQLAlchemyError."""
    block_s = span.resolution.block_s
    first_s = span.from_s - span.from_s % block_s
    only = uuids if len(uuids) <= CHUNK else None
    stored = gpu_metrics_table.blocks_between(
        store.engine, only, span.resolution.width_s, first_s, span.from_s + span.count * span.bucket_s
    )
    found = {uuid: list(copied.get(uuid, ())) for uuid in uuids}
    in_memory = {
        (uuid, block.start_s): block
        for uuid, blocks in copied.items()
        for block, _ in blocks
        if block.resolution is span.resolution
    }
    for row in stored:
        if row.gpu_uuid not in found or (block := _block(row)) is None:
            continue
        newer = in_memory.get((row.gpu_uuid, row.start_s))
        if newer is None:
            found[row.gpu_uuid].append((block, 0))
        elif not newer.loaded:
            newer.merge(block)
    return found


def _row(uuid: str, block: Block) -> BlockRow:
    return BlockRow(uuid, block.resolution.width_s, block.start_s)


def _block(row: BlockRow) -> Block | None:
    """The block of a row; None if it is damaged."""
    try:
        return Block.from_bytes(BY_WIDTH[row.width_s], row.start_s, row.content)
    except (DamagedSeries, KeyError) as error:
        log.error("a row of the history of %s cannot be read: %s", row.gpu_uuid, error)
        return None


def _copy(block: Block) -> Block:
    copied = Block(block.resolution, block.start_s, block.cells[:])
    copied.loaded = block.loaded
    return copied
