"""The environment of a lease: what a training run under it needs, on one node or on each node of a gang."""

from __future__ import annotations

import itertools

from gpulease_protocol.model import Device, Lease, LeaseMember
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import GpuRecord

LOOPBACK = "127.0.0.1"


def lease_env(lease: Lease, gpus: tuple[Device, ...], token: int, port: int, master: str = LOOPBACK) -> dict[str, str]:
    """The variables of a lease on one node, or of one node of a gang. `master`: where rank 0 is."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GPULEASE_LEASE_ID": lease.id,
        "GPULEASE_LEASE_TOKEN": str(token),
    }


def gang_members(
    ledger: Ledger, lease: Lease, gpus: tuple[GpuRecord, ...], token: int, port: int
) -> tuple[LeaseMember, ...]:
    """The members of a gang by rank; `gpus` come node by node in that order. None for a lease on one node."""
    if lease.demand.nodes == 1:
        return ()
    of_node = {
        node: tuple(gpu.device for gpu in some) for node, some in itertools.groupby(gpus, lambda gpu: gpu.device.node)
    }
    observations = [ledger.node_observations[node] for node in of_node]
    addresses = [one.address or LOOPBACK for one in observations]
    every_address = ",".join(addresses)
    found = []
    for rank, (observation, devices) in enumerate(zip(observations, of_node.values(), strict=True)):
        env = lease_env(lease, devices, token, port, addresses[0]) | {
            "NODE_RANK": str(rank),
            "NNODES": str(len(of_node)),
            "GPULEASE_NODES": every_address,
            "GPULEASE_GPUS_PER_NODE": str(len(devices)),
        }
        if observation.interface is not None:
            env |= {"GLOO_SOCKET_IFNAME": observation.interface, "NCCL_SOCKET_IFNAME": observation.interface}
        member = LeaseMember(rank=rank, node=observation.node, address=addresses[rank], gpus=devices, env=env)
        found.append(member)
    return tuple(found)
