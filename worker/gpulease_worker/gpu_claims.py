"""Claims each GPU for this worker before it is reported, so that a GPU is in the ledger of one daemon.

A claim is an abstract Unix socket that is named after the GPU's UUID (docs/design/0007). Simulated GPUs are not
claimed: they exist in one worker only, whatever their UUIDs.

The states of a GPU here, by UUID:

- claimed: this process has the socket, until it ends. Only such a GPU is reported as one that can be granted.
- another's: another process has it. The GPU is reported with the reason, and without a reading.
- left: another process had it for `CERTAIN_S` or longer and has let go. It stays unclaimed for `HANDOVER_S`, because
  its worker may be restarting while its leases and jobs go on.

Invariants: at most one process of a network namespace has a GPU claimed. A worker that starts claims at once what no
process has, so a restarted worker gets its GPUs back from a worker that waits.

What each failure does:

- A worker ends or is killed, or its host reboots: the kernel frees its claims; no file is left.
- A worker restarts while another waits for its GPUs: the restarted one has them again.
- It does not come back: the other claims them after `HANDOVER_S`.
- A second daemon is started for the first time while the first one's worker is away: it claims them. The first one says
  who has them, and keeps its leases; processes of those leases make the GPU `foreign` to the second one.
- No file descriptor is left, or a security module forbids it: the GPU is not claimed, so it is not granted; the reason
  says why.
- The process that has a GPU is stopped: it keeps its claims. Its pid and user may become unknown.
- A process that is no worker takes the name: as another worker. The reason names its pid and user.
- Two network namespaces (containers without the host's network): neither sees the other's claims. The worker warns when
  it starts, and `gpulease doctor` says so.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Mapping

from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device, GpuReading
from gpulease_protocol.node_protocol import ClaimedGpu
from gpulease_worker.probe.process_attribution import DEVICE_FILES
from gpulease_worker.processes import abstract_socket
from gpulease_worker.processes.abstract_socket import NameHolder

CERTAIN_S = 10.0
"""A process that has a GPU for so long is no remnant of this worker's own predecessor."""
HANDOVER_S = 600.0
"""How long a GPU that another worker had stays unclaimed after that worker has gone."""
NOT_CLAIMED = "it could not be claimed for this worker"
NOT_OF_THE_HOST = (
    "this process has a network namespace of its own, so another gpulease worker on this host may have claimed the same"
    " GPUs; use the host's network (docker run --network=host)"
)

log = logging.getLogger(__name__)


def claim_name(uuid: str) -> str:
    """Name of the claim on a GPU. Stand-ins for device files have names of their own."""
    stand_in = os.environ.get(DEVICE_FILES)
    return f"gpulease-{canonical_uuid(uuid)}{f'-{zlib.crc32(stand_in.encode())}' if stand_in else ''}"


def holder_of(uuid: str) -> str | None:
    """The process that has claimed a GPU, such as "pid 4242, user ada"; None if none has."""
    holder = abstract_socket.holder_of(claim_name(uuid))
    return None if holder is None else holder.described


@dataclass(slots=True)
class _Other:
    """Another process that has or had a GPU."""

    holder: NameHolder
    since_s: float
    """When it was first seen to have it."""
    seen_s: float
    """When it was last seen to have it."""


def set_aside(
    gpus: tuple[GpuReading, ...], others: tuple[ClaimedGpu, ...], reasons: Mapping[str, str]
) -> tuple[tuple[GpuReading, ...], tuple[ClaimedGpu, ...]]:
    """The GPUs of this worker without those that have a reason, by UUID, not to be leased; and all others."""
    kept = tuple(_claimed(gpu, reasons[gpu.uuid]) for gpu in gpus if gpu.uuid in reasons)
    return tuple(gpu for gpu in gpus if gpu.uuid not in reasons), (*others, *kept)


def _claimed(gpu: GpuReading, reason: str) -> ClaimedGpu:
    return ClaimedGpu(
        device=Device(**{name: getattr(gpu, name) for name in Device.__dataclass_fields__}), reason=reason
    )


class GpuClaims:
    """The claims of this process. Everything is freed when the process ends, or by `close`.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._claims: dict[str, socket.socket] = {}
        self._others: dict[str, _Other] = {}
        self._logged: dict[str, str] = {}
        self._begun = False

    def claim(self, gpus: Iterable[GpuReading]) -> tuple[tuple[GpuReading, ...], tuple[ClaimedGpu, ...]]:
        """Claim what no other process has. Returns the GPUs that this process has claimed, and all others."""
        if not self._begun and abstract_socket.names_are_of_the_host() is False:
            log.warning(NOT_OF_THE_HOST)
        self._begun = True
        claimed, others = [], []
        for gpu in gpus:
            why = self._why_not(gpu.uuid)
            if why is None:
                claimed.append(gpu)
            else:
                others.append(_claimed(gpu, why))
        self._log_changes({one.device.uuid: one.reason for one in others})
        for listener in self._claims.values():
            abstract_socket.answer(listener)
        return tuple(claimed), tuple(others)

    def has(self, uuid: str) -> bool:
        """True if this process has claimed a GPU."""
        return uuid in self._claims

    def close(self) -> None:
        """Free all claims."""
        for listener in self._claims.values():
            listener.close()
        self._claims.clear()

    def _why_not(self, uuid: str) -> str | None:
        """Claim a GPU. None if this process has it now, else why not, as after "GPU 0 of n is unknown: "."""
        if uuid in self._claims:
            return None
        name, now_s, other = claim_name(uuid), self._clock(), self._others.get(uuid)
        try:
            holder = abstract_socket.holder_of(name)
        except OSError as error:
            return f"{NOT_CLAIMED}: {error.strerror or error}"
        if holder is None and other is not None and _is_left(other, now_s):
            return (
                f"another gpulease worker of this host had it until recently ({other.holder.described}); this one"
                f" takes it over after {HANDOVER_S / 60:.0f} minutes, or when it is started again"
            )
        if holder is None:
            try:
                listener = abstract_socket.bind(name)
            except OSError as error:
                return f"{NOT_CLAIMED}: {error.strerror or error}"
            if listener is not None:
                self._claims[uuid] = listener
                self._others.pop(uuid, None)
                return None
            holder = NameHolder()
        if other is not None and holder == NameHolder():
            holder = other.holder  # it does not say now
        self._others[uuid] = _Other(holder, now_s if other is None else other.since_s, now_s)
        return f"it is in the ledger of another gpulease daemon, whose worker is {holder.described}"

    def _log_changes(self, reasons: dict[str, str]) -> None:
        for uuid in reasons.keys() | self._logged.keys():
            if uuid not in reasons:
                log.info("GPU %s is claimed for this worker now", uuid)
            elif reasons[uuid] != self._logged.get(uuid):
                log.warning("GPU %s is not leased here: %s", uuid, reasons[uuid])
        self._logged = reasons


def _is_left(other: _Other, now_s: float) -> bool:
    return other.seen_s - other.since_s >= CERTAIN_S and now_s - other.seen_s < HANDOVER_S
