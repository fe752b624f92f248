"""What the routes, fields and arguments that remedies name are called on the command line."""

from __future__ import annotations

COMMANDS = {
    "GET /v1/gpus": "gpulease status",
    "GET /v1/nodes": "gpulease node list",
    "GET /v1/leases": "gpulease leases",
    "GET /v1/jobs": "gpulease jobs",
    "GET /v1/limits": "gpulease limits list",
    "GET /v1/reservations": "gpulease reservations list",
    "GET /v1/tokens": "gpulease token list",
    "POST /v1/tokens": "gpulease token create",
    "GET /v1/jobs/{}": "gpulease show {}",
    "POST /v1/jobs/{}/cancel": "gpulease cancel {}",
    '"queue": true': "--wait 10m",
    '"force": true': "--force",
    "wait_s=600": "--wait 10m",
}
"""For `errors.respelled`."""
