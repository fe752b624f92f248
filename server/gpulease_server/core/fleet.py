"""The fleet: which GPUs and leases are on which node, which GPUs are free, and which could serve a demand."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import field
from operator import attrgetter
from typing import TypeVar

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, TopologyMode
from gpulease_server.core.gpu_state import is_cordoned
from gpulease_server.core.limit_index import add
from gpulease_server.core.records import GpuRecord, NodeObservation, NodeRecord, connects_as

Member = TypeVar("Member")
_PCI_ORDER = attrgetter("index", "uuid")
"""What a node's devices are sorted by."""
MAX_KNOWN_UUIDS = 100_000
"""How many UUIDs may be kept of the demands that were looked for: those that they name, and those that could serve
them. About 10 MB."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The GPUs that could serve a demand now or later."""

    by_model: dict[str, dict[str, tuple[str, ...]]]
    """By product name and node: UUIDs in PCI order, of the models of which enough nodes have enough. For a demand on
    one node all models are under one name, the empty one."""
    uuids: frozenset[str]
    """All of them."""
    by_node: dict[str, tuple[str, ...]] = field(init=False)
    """The same by node alone."""
    places: dict[str, int] = field(init=False)
    """By node: its place in `by_node`."""

    def __post_init__(self) -> None:
        by_node: dict[str, tuple[str, ...]] = {}
        for nodes in self.by_model.values():
            for node, uuids in nodes.items():
                by_node[node] = by_node.get(node, ()) + uuids
        object.__setattr__(self, "by_node", by_node)
        object.__setattr__(self, "places", {node: place for place, node in enumerate(self.by_node)})

    def nodes_in(self, others: Collection[str]) -> Iterable[str]:
        """The nodes that are among others, in the order of `by_node`. Costs as much as there are others."""
        if len(others) < len(self.by_node):
            return sorted((node for node in others if node in self.places), key=self.places.__getitem__)
        return (node for node in self.by_node if node in others)


@dataclass(slots=True)
class Fleet:
    """Indexes of the ledger's GPUs and nodes, so that no turn has to look at all of them. A part of the ledger, which
    calls the methods that change it."""

    gpus_of_node: dict[str, dict[str, GpuRecord]] = field(default_factory=dict)
    """By node and UUID: its GPUs, in the order in which they became known."""
    nodes_of_host: dict[str, dict[str, None]] = field(default_factory=dict)
    """By host: the names of its nodes; two simulated ones may share it."""
    holders_of_node: dict[str, Counter[str]] = field(default_factory=dict)
    """By node: the leases that hold its GPUs or drain on them, and on how many."""
    unheld: dict[str, dict[str, GpuRecord]] = field(default_factory=dict)
    """By node and UUID: its GPUs that no lease holds or drains on; without nodes that have none."""
    free: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By node: the UUIDs of its GPUs that are free by its last report, in PCI order; without nodes that have none."""
    free_gpus: set[str] = field(default_factory=set)
    """The UUIDs of all of these."""
    nodes_by_free: dict[int, list[str]] = field(default_factory=dict)
    """By number of GPUs in `free`: the names of the nodes, sorted."""
    candidates: dict[Demand, Candidates] = field(default_factory=dict, compare=False)
    """What could serve a demand ever, for those that were looked for. Emptied when the list of GPUs changes."""
    required: dict[Demand, None] = field(default_factory=dict, compare=False)
    """Those of them that require connections between GPUs."""
    _pci_places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By UUID: what GPUs of a node are sorted by."""
    _known_uuids: int = field(default=0, compare=False)
    """How many UUIDs are in `candidates`."""

    def put_gpu(self, before: GpuRecord | None, record: GpuRecord) -> None:
        """Add or change a GPU. `find_free` is to be called for its node and for the one on which it was, or, where its
        device has not changed, `find_whether_free` for it."""
        device = record.device
        if before is None:
            self._forget_candidates()
            self._pci_places[device.uuid] = _PCI_ORDER(device)
        elif before.device is not device and before.device != device:
            self._pci_places[device.uuid] = _PCI_ORDER(device)
            self._forget_candidates()
            if before.device.node != device.node:
                discard(self.gpus_of_node, before.device.node, device.uuid)
        if before is None:
            self._count_holder(record, 1)
        elif before.lease_id is None or before.lease_id != record.lease_id or before.device is not device:
            self._count_holder(before, -1)
            self._count_holder(record, 1)
        self.gpus_of_node.setdefault(device.node, {})[device.uuid] = record

    def remove_gpu(self, record: GpuRecord) -> None:
        """Remove a GPU. `find_free` is to be called for its node."""
        self._count_holder(record, -1)
        discard(self.gpus_of_node, record.device.node, record.device.uuid)
        del self._pci_places[record.device.uuid]
        self._forget_candidates()

    def put_node(self, before: NodeRecord | None, record: NodeRecord) -> None:
        """Add or change a node."""
        if before is not None and before.host != record.host:
            discard(self.nodes_of_host, before.host, before.name)
        self.nodes_of_host.setdefault(record.host, {})[record.name] = None

    def remove_node(self, record: NodeRecord) -> None:
        """Remove a node."""
        discard(self.nodes_of_host, record.host, record.name)

    def find_free(self, name: str, node: NodeRecord | None, observation: NodeObservation | None) -> None:
        """Bring what is free on a node up to date."""
        unheld, clear = self.unheld.get(name, {}), frozenset() if observation is None else observation.clear
        free = [gpu.device for uuid, gpu in unheld.items() if uuid in clear and not is_cordoned(gpu, node)]
        self.free_gpus.difference_update(self.free.get(name, ()))
        self.free_gpus.update(device.uuid for device in free)
        self._put_free(name, tuple(device.uuid for device in sorted(free, key=_PCI_ORDER)))

    def find_whether_free(
        self, record: GpuRecord, node: NodeRecord | None, observation: NodeObservation | None
    ) -> None:
        """The same for one of its GPUs, which is the only one that has changed."""
        name, uuid = record.device.node, record.device.uuid
        is_clear = record.lease_id is None and observation is not None and uuid in observation.clear
        is_free = is_clear and not is_cordoned(record, node)
        if is_free is (uuid in self.free_gpus):
            return
        before = self.free.get(name, ())
        if is_free:
            self.free_gpus.add(uuid)
            at = bisect.bisect_left(before, self._pci_places[uuid], key=self._pci_places.__getitem__)
            self._put_free(name, (*before[:at], uuid, *before[at:]))
        else:
            self.free_gpus.remove(uuid)
            at = before.index(uuid)
            self._put_free(name, before[:at] + before[at + 1 :])

    def _put_free(self, name: str, uuids: tuple[str, ...]) -> None:
        """Note which GPUs of a node are free, as `free_gpus` has them by now."""
        before = self.free.pop(name, ())
        if len(before) != len(uuids):
            if before:
                nodes = self.nodes_by_free[len(before)]
                del nodes[bisect.bisect_left(nodes, name)]
                if not nodes:
                    del self.nodes_by_free[len(before)]
            if uuids:
                bisect.insort(self.nodes_by_free.setdefault(len(uuids), []), name)
        if uuids:
            self.free[name] = uuids

    def keep_candidates(self, demand: Demand, found: Candidates) -> None:
        """Keep what could serve a demand, and let go what was looked for first where that is too much."""
        self.candidates[demand] = found
        if demand.topology is TopologyMode.REQUIRED:
            self.required[demand] = None
        self._known_uuids += _size(demand, found)
        while self._known_uuids > MAX_KNOWN_UUIDS and len(self.candidates) > 1:
            oldest = next(iter(self.candidates))
            self._known_uuids -= _size(oldest, self.candidates.pop(oldest))
            self.required.pop(oldest, None)

    def put_observation(self, before: NodeObservation | None, observation: NodeObservation) -> None:
        """Forget what could serve the demands that require connections where those of a node have changed."""
        if not self.required or (before is not None and connects_as(before, observation)):
            return
        for demand in self.required:
            self._known_uuids -= _size(demand, self.candidates.pop(demand))
        self.required.clear()

    def _forget_candidates(self) -> None:
        self.candidates.clear()
        self.required.clear()
        self._known_uuids = 0

    def _count_holder(self, record: GpuRecord, gpus: int) -> None:
        """Note that a lease holds a GPU more (1) or fewer (-1), or that no lease does."""
        node = record.device.node
        if record.lease_id is None:
            if gpus > 0:
                self.unheld.setdefault(node, {})[record.device.uuid] = record
            else:
                discard(self.unheld, node, record.device.uuid)
            return
        holders = self.holders_of_node.get(node)
        if holders is None:
            holders = self.holders_of_node[node] = Counter()
        add(holders, record.lease_id, gpus)
        if not holders:
            del self.holders_of_node[node]


def _size(demand: Demand, found: Candidates) -> int:
    """How many UUIDs it takes to keep the candidates of a demand; a demand without any counts, too."""
    return 1 + len(demand.uuids) + len(demand.among or ()) + len(found.uuids)


def discard(index: dict[str, dict[str, Member]], key: str, member: str) -> None:
    """Take a member out of an index; the key, too, when it was the last one."""
    members = index[key]
    del members[member]
    if not members:
        del index[key]
