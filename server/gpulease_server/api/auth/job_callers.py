"""What a job may do with its own token (`runtime.job_tokens`): look at its lease and itself, renew the lease, and say
that its idle GPUs are kept on purpose.

Every other route is refused, also those that are open to every known caller. Of GPUs and nodes it sees those of its own
lease's nodes, which `find_usable_cuda_devices` needs to tell CUDA's numbers, and nothing of who else uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpulease_protocol.model import Gpu
from gpulease_protocol.tokens import Role
from gpulease_server.api.auth.callers import Caller
from gpulease_server.core.ledger import Ledger

OPERATIONS = frozenset(
    (
        *("GET /v1/me", "GET /v1/gpus", "GET /v1/gpus/{uuid}", "GET /v1/nodes", "GET /v1/nodes/{name}"),
        *("GET /v1/leases/{lease_id}", "GET /v1/leases/{lease_id}/explain", "POST /v1/leases/{lease_id}/renew"),
        *("GET /v1/leases/{lease_id}/metrics", "POST /v1/leases/{lease_id}/keep"),
        *("GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/logs", "GET /v1/jobs/{job_id}/metrics"),
    )
)
"""Method and path of the routes."""


def is_allowed(caller: Caller, operation: str, parameters: Mapping[str, str], ledger: Ledger) -> bool:
    """Whether a job may use a route, which names its own lease, job or node where it names any."""
    if operation not in OPERATIONS:
        return False
    nodes = nodes_of(caller, ledger)
    gpu = ledger.gpus.get(parameters.get("uuid", ""))
    return (
        parameters.get("lease_id", caller.lease_id) == caller.lease_id
        and parameters.get("job_id", caller.job_id) == caller.job_id
        and ("name" not in parameters or parameters["name"] in nodes)
        and ("uuid" not in parameters or (gpu is not None and gpu.device.node in nodes))
    )


def nodes_of(caller: Caller, ledger: Ledger) -> frozenset[str]:
    """The nodes of a job's lease."""
    record = ledger.leases.get(caller.lease_id or "")
    return frozenset() if record is None else frozenset(gpu.node for gpu in record.lease.gpus)


def may_see_node(caller: Caller, node: str, ledger: Ledger) -> bool:
    """Whether a caller sees a node and its GPUs: a job those of its lease."""
    return caller.role is not Role.JOB or node in nodes_of(caller, ledger)


def redact_for_job(caller: Caller, gpu: Gpu) -> Gpu:
    """A GPU as a job may see it: of others than its own, nothing of who uses them."""
    if caller.role is not Role.JOB or gpu.lease_id == caller.lease_id:
        return gpu
    return replace(
        gpu,
        lease_id=None,
        holder=None,
        reason=None,
        reserved_for=None,
        processes=(),
        opened_by=None,
        unreadable_process=None,
    )
