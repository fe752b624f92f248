"""Which GPUs of its host a worker shows: those that it was given (`--gpus`, or an allocation), by UUID from then on.

An allocation names GPUs by numbers, which are those of the device files, or places in what the allocation may open.
Where the driver shows exactly as many GPUs as were given, the allocation can open no others, and they are these.
Otherwise a number is that of the device file; of simulated GPUs, which have none, it is the index.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.model import GpuLink, GpuReading

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]+")
NUMBERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
ALLOCATED = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")
"""Variables in which an allocation names its GPUs; the first that is set counts."""

log = logging.getLogger(__name__)


def parse_gpus(text: str) -> tuple[frozenset[str], frozenset[int]]:
    """UUIDs and numbers of a list such as `0-3,6` or `GPU-1b...,GPU-2c...`. Raises `InvalidRequest`."""
    uuids, numbers = set[str](), set[int]()
    for word in filter(None, (part.strip() for part in text.split(","))):
        if UUID.fullmatch(word):
            uuids.add(canonical_uuid(word) if word.startswith("GPU-") else word)
        elif (found := NUMBERS.fullmatch(word)) is not None:
            numbers |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
        else:
            raise InvalidRequest(
                f"gpus: {word!r} is neither a UUID nor a number.",
                remedy="Name them as `gpulease gpu list` does, such as --gpus 0-3,6.",
            )
    return frozenset(uuids), frozenset(numbers)


class ShownGpus:
    """The GPUs that a worker shows.

    Args:
        gpus: What was given with `--gpus`; None for all, or for those of the allocation.
        allocation: The environment of the allocation; empty where there is none.
    """

    def __init__(self, gpus: str | None, allocation: Mapping[str, str]) -> None:
        allocated = next((allocation[name] for name in ALLOCATED if allocation.get(name)), None)
        self._is_allocated = gpus is None and allocated is not None
        named = gpus if gpus is not None else allocated
        self._uuids, self._numbers = (frozenset(), frozenset()) if named is None else parse_gpus(named)
        self._shows_all = named is None
        self._found: frozenset[str] = frozenset()
        """UUIDs of the GPUs that were found by a number: they stay the same when another GPU is lost."""
        self._missing: list[str] = []
        """UUIDs that were given, and that the last reading did not show."""

    def of(self, gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
        """Those that are shown."""
        if self._shows_all or not gpus:
            return tuple(gpus)
        if self._numbers and not self._found:
            self._found = self._find(gpus)
        missing = sorted(self._uuids - {gpu.uuid for gpu in gpus})
        if missing and missing != self._missing:
            of = ", ".join(f"{gpu.index} {gpu.uuid}" for gpu in gpus[:16])
            log.error("this host has no GPU %s, which was given to this worker; it has %s", ", ".join(missing), of)
        self._missing = missing
        return tuple(gpu for gpu in gpus if gpu.uuid in self._uuids or gpu.uuid in self._found)

    def links_between(self, gpus: Sequence[GpuReading], links: Sequence[GpuLink]) -> tuple[GpuLink, ...]:
        """The links with both ends shown."""
        if self._shows_all:
            return tuple(links)
        shown = {gpu.uuid for gpu in gpus}
        return tuple(link for link in links if {link.first, link.second} <= shown)

    def _find(self, gpus: Sequence[GpuReading]) -> frozenset[str]:
        if self._is_allocated and len(gpus) == len(self._numbers):
            return frozenset(gpu.uuid for gpu in gpus)
        by_file = self._is_allocated and all(gpu.minor_number is not None for gpu in gpus)
        found = {gpu.minor_number if by_file else gpu.index: gpu.uuid for gpu in gpus}
        missing = sorted(self._numbers - found.keys())
        if missing:
            log.error("this host has no GPU %s, which was given to this worker", ", ".join(map(str, missing)))
        return frozenset(uuid for number, uuid in found.items() if number in self._numbers)
