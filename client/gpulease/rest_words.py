"""What the routes and fields that a daemon's remedies name are called in Python."""

from __future__ import annotations

METHODS = {
    "GET /v1/gpus": "client.gpus()",
    "GET /v1/nodes": "client.nodes()",
    "GET /v1/leases": "client.leases()",
    "GET /v1/jobs": "client.jobs()",
    "GET /v1/limits": "client.limits()",
    "GET /v1/reservations": "client.reservations()",
    "GET /v1/tokens": "client.tokens()",
    "POST /v1/tokens": "gpulease token create",
    "GET /v1/jobs/{}": 'client.job("{}")',
    "POST /v1/jobs/{}/cancel": 'client.cancel_job("{}")',
    '"queue": true': "wait_s=600",
    '"force": true': "force=True",
}
"""For `errors.respelled`."""
