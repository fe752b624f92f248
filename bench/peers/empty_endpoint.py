"""An empty FastAPI endpoint under the daemon's own uvicorn settings: what a request can cost at the least.

It takes the same requests and answers as many bytes as the daemon does, from a lease that it is given,
and decides and stores nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response

from bench.peers import listens, running
from tests.ports import free_port


@contextmanager
def empty_endpoint(lease: bytes, directory: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of a server that answers every request with this lease."""
    port = free_port()
    answer = directory / "lease.json"
    answer.write_bytes(lease)
    command = [sys.executable, "-m", "bench.peers.empty_endpoint", str(port), str(answer)]
    with running(command, directory / "empty.log", lambda: listens(port)) as process:
        yield port, process.pid


def serve(port: int, answer: bytes) -> None:
    """Run the server."""
    app = FastAPI()

    @app.post("/v1/leases")
    async def acquire(request: Request) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    @app.post("/v1/leases/{lease_id}/renew")
    @app.post("/v1/leases/{lease_id}/release")
    async def change(lease_id: str, request: Request) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", ws="none", log_level="warning",
                access_log=False, server_header=False)  # fmt: skip


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]).read_bytes())
