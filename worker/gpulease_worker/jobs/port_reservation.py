"""Reserves ports for `MASTER_PORT`, so that two daemons on one host never give out the same.

`LEASE_PORTS` is divided into blocks. A worker has a block while it has the abstract Unix socket of that name, which is
valid in one network namespace, as TCP ports are. Its daemon gives out ports of these blocks only, and knows which it
has given out; so no two daemons can choose the same, also before anything listens there.

What each failure does:

- A worker restarts: it begins at the same block, which follows from its data directory.
- Another worker has taken that block meanwhile: it takes another one. Leases from before keep their ports. A worker
  that needs a block in addition takes one on which nothing listens, if there is one.
- All blocks are taken, or a node needs more ports than `MAX_BLOCKS` have: the daemon chooses any port of the range on
  which nothing listens.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Collection
from pathlib import Path

from gpulease_protocol.node_protocol import LEASE_PORTS
from gpulease_worker.processes import abstract_socket

BLOCK = 16
"""Ports of a block: one for each GPU of a usual host, since a lease has one port and at least one GPU."""
MAX_BLOCKS = 8
"""Blocks that one worker takes, at most."""

log = logging.getLogger(__name__)


class PortReservation:
    """The ports that this process has reserved.

    Args:
        data_dir: The worker's: which block it takes first follows from it.
    """

    def __init__(self, data_dir: Path) -> None:
        blocks = range(LEASE_PORTS.start, LEASE_PORTS.stop, BLOCK)
        begin = zlib.crc32(str(data_dir).encode()) % len(blocks)
        self._order = (*blocks[begin:], *blocks[:begin])
        self._blocks: dict[int, socket.socket] = {}
        self._logged = ""

    def reserve(self, gpus: int, in_use: Collection[int]) -> tuple[int, ...]:
        """Every port that this process has reserved, ascending; enough for a lease on each GPU, where there are.

        Args:
            gpus: How many GPUs the node has.
            in_use: Ports on which a process of this host listens.
        """
        busy = set(in_use)
        if self._lacks(gpus, busy):
            # The first block is this worker's from before, and its jobs may listen there; others were someone else's.
            later = sorted(self._order[1:], key=lambda start: not busy.isdisjoint(_ports(start)))
            for start in (self._order[0], *later):
                if start not in self._blocks and self._lacks(gpus, busy):
                    self._try(start)
        for listener in self._blocks.values():
            abstract_socket.answer(listener)
        return self._ports()

    def close(self) -> None:
        """Give all ports back."""
        for listener in self._blocks.values():
            listener.close()
        self._blocks.clear()

    def _lacks(self, gpus: int, busy: set[int]) -> bool:
        return len(set(self._ports()) - busy) < max(gpus, 1) and len(self._blocks) < MAX_BLOCKS

    def _try(self, start: int) -> None:
        try:
            listener = abstract_socket.bind(f"gpulease-ports-{start}")
        except OSError as error:
            if str(error) != self._logged:
                log.warning("no port can be reserved for MASTER_PORT: %s", error)
            self._logged = str(error)
            return
        if listener is not None:
            self._blocks[start] = listener

    def _ports(self) -> tuple[int, ...]:
        return tuple(port for start in sorted(self._blocks) for port in _ports(start))


def _ports(start: int) -> range:
    return range(start, min(start + BLOCK, LEASE_PORTS.stop))
