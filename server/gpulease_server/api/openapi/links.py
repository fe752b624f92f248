"""OpenAPI links: which route follows from which answer. schemathesis follows them in tests (its stateful phase).

Here a link names its operation by method and path, because the operation ids that FastAPI generates are not stable.
"""

from __future__ import annotations

from typing import Any

OWN_ID, TOKEN = "$response.body#/id", "$response.body#/token"
FIRST_ID, FIRST_TOKEN = "$response.body#/items/0/id", "$response.body#/items/0/token"


def _of_lease(lease: str, token: str) -> dict[str, tuple[str, dict[str, str], dict[str, str] | None]]:
    place, proof = {"lease_id": lease}, {"token": token}
    return {
        "lease": ("get /v1/leases/{lease_id}", place, None),
        "why": ("get /v1/leases/{lease_id}/explain", place, None),
        "renew": ("post /v1/leases/{lease_id}/renew", place, proof),
        "release": ("post /v1/leases/{lease_id}/release", place, proof),
    }


def _of_job(job: str) -> dict[str, tuple[str, dict[str, str], dict[str, str] | None]]:
    place = {"job_id": job}
    return {
        "job": ("get /v1/jobs/{job_id}", place, None),
        "logs": ("get /v1/jobs/{job_id}/logs", place, None),
        "metrics": ("get /v1/jobs/{job_id}/metrics", place, None),
        "cancel": ("post /v1/jobs/{job_id}/cancel", place, None),
    }


NEXT_PAGE = {"cursor": "$response.body#/next"}
LEASE_OF_JOB = {"its_lease": ("get /v1/leases/{lease_id}", {"lease_id": "$response.body#/lease_id"}, None)}
UUID, NODE = {"uuid": "$response.body#/items/0/uuid"}, {"name": "$response.body#/items/0/name"}
LINKS: dict[tuple[str, str], dict[str, tuple[str, dict[str, str], dict[str, str] | None]]] = {
    ("post /v1/leases", "201"): _of_lease(OWN_ID, TOKEN),
    ("post /v1/leases", "202"): _of_lease(OWN_ID, TOKEN),
    ("get /v1/leases", "200"): _of_lease(FIRST_ID, FIRST_TOKEN) | {"next": ("get /v1/leases", NEXT_PAGE, None)},
    ("post /v1/jobs", "201"): _of_job(OWN_ID) | LEASE_OF_JOB,
    ("get /v1/jobs", "200"): _of_job(FIRST_ID) | {"next": ("get /v1/jobs", NEXT_PAGE, None)},
    ("get /v1/gpus", "200"): {
        "gpu": ("get /v1/gpus/{uuid}", UUID, None),
        "cordon": ("post /v1/gpus/{uuid}/cordon", UUID, None),
        "uncordon": ("post /v1/gpus/{uuid}/uncordon", UUID, None),
    },
    ("get /v1/nodes", "200"): {
        "node": ("get /v1/nodes/{name}", NODE, None),
        "drain": ("post /v1/nodes/{name}/drain", NODE, None),
        "resume": ("post /v1/nodes/{name}/resume", NODE, None),
        "pause": ("post /v1/nodes/{name}/pause", NODE, None),
        "forget": ("post /v1/nodes/{name}/forget", NODE, None),
    },
    ("get /v1/events", "200"): {"next": ("get /v1/events", {"after": "$response.body#/next"}, None)},
}
"""By operation and status: name of the link, its target, parameters and body."""


def add_links(document: dict[str, Any]) -> None:
    """Add the links to an OpenAPI document. Raises KeyError if a target does not exist."""

    def operation(spelled: str) -> dict[str, Any]:
        method, path = spelled.split()
        found: dict[str, Any] = document["paths"][path][method]
        return found

    for (source, status), links in LINKS.items():
        answer = operation(source)["responses"][status]
        answer["links"] = {
            name: {"operationId": operation(target)["operationId"], "parameters": parameters}
            | ({} if body is None else {"requestBody": body})
            for name, (target, parameters, body) in links.items()
        }
