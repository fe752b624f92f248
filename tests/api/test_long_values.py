"""A problem document repeats nothing that is long, whatever was sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
from starlette.types import Receive, Scope, Send

from gpulease_server.api.app import create_app
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.store.database import upgrade
from tests.runtime.faults import report, writing

LONG = "x" * 500_000
URL = LONG[:50_000]
UUIDS = [f"GPU-{number:08x}-{'0' * 60}" for number in range(4096)]
SMALL_BYTES = 4400
JOB: dict[str, Any] = {"command": ["train.py"]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/leases", {"node": LONG, "queue": False}),
    ("/v1/leases", {"node": "x" * 255, "queue": False}),
    ("/v1/leases", {"gpu_model": LONG}),
    ("/v1/leases", {"among": [LONG]}),
    ("/v1/leases", {"devices": LONG}),
    ("/v1/leases", {"devices": UUIDS}),
    ("/v1/leases", {"devices": list(range(1, 4097))}),
    ("/v1/leases", {"count": int("9" * 4000)}),
    ("/v1/leases", {LONG: 1}),
    ("/v1/leases", {f"{LONG[:1000]}{number}": 1 for number in range(100)}),
    ("/v1/leases", {"queue": LONG}),
    ("/v1/jobs", JOB | {"launcher": LONG}),
    ("/v1/jobs", JOB | {"environment": {LONG: "1"}}),
    ("/v1/jobs", JOB | {"environment": {"A": {LONG: LONG}}}),
    ("/v1/jobs", JOB | {"limits": {LONG: [0, 1]}}),
    ("/v1/jobs", {"command": [f"--{LONG[:100_000]}"]}),
    ("/v1/jobs", JOB | {"array": {"indices": LONG}}),
    ("/v1/tokens", {"user": LONG}),
]
PATHS = [
    f"/v1/leases/{URL}",
    f"/v1/jobs/{URL}",
    f"/v1/jobs/{URL}/logs",
    f"/v1/gpus/{URL}",
    f"/v1/nodes/{URL}",
    f"/{URL}",
    "/v1/nodes" + "/x" * 20_000,
    f"/v1/leases?{URL}=1",
    f"/v1/leases?state={URL}",
    f"/v1/leases?cursor={URL}",
    f"/v1/jobs?array={URL}",
]


def test_a_refusal_is_small(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)

    async def main() -> list[tuple[str, int, int]]:
        async with asyncio.timeout(60), writing(url) as (writer, store):
            await report(writer)
            nothing: Any = None
            app = create_app(
                DaemonState(writer=writer, store=store, tickets=DesiredStateTickets(), recorder=nothing, host="here")
            )

            async def of_root(scope: Scope, receive: Receive, send: Send) -> None:
                scope["state"] = {"peer": PeerCredentials(uid=0, local=True, connection=ConnectionType.SOCKET)}
                await app(scope, receive, send)

            transport = httpx2.ASGITransport(of_root)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answers = [(f"{path} {str(body)[:40]}", await client.post(path, json=body)) for path, body in BODIES]
                answers += [(path[:40], await client.get(path)) for path in PATHS]
                answers.append(("a method", await client.post(f"/v1/nodes/{URL}", json={})))
        return [(name, answer.status_code, len(answer.content)) for name, answer in answers]

    found = asyncio.run(main())
    assert len(found) == len(BODIES) + len(PATHS) + 1
    wrong = [item for item in found if not 400 <= item[1] < 500 or item[2] > SMALL_BYTES]
    assert wrong == []
