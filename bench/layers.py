"""Which layer of the daemon takes the CPU time of its requests? A profile by py-spy, at 64 clients.

    pip install py-spy && python -m bench.layers

Samples are of threads that hold the interpreter: what waits, and what SQLite does without it, is not in them. A sample
counts for the innermost frame that belongs to a layer: what a library does counts for its caller where no layer has it.
So does what others do with the ledger: the writer applies what is committed to the one that readers see, and a route
looks up how a lease is shown.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.clients import Load, measured
from bench.daemon import InstalledDaemon, installed
from bench.requests import CLIENTS, GPUS

SECONDS, RATE_HZ = 10, 200
LAYERS = {
    "the kernel sends an answer": ("_send (gpulease_server/api/direct_connection",),
    "HTTP: read and write": (
        "uvicorn/protocols/", "httptools", "api/http_limits", "api/auth/peer_credentials", "api/direct_connection",
    ),
    "hot path and routes": ("api/hot_path/", "api/routes/", "api/app"),
    "rules of the middlewares, fair share, waits": (
        "api/middleware/", "api/fair_share", "api/daemon_state", "api/streams/", "prometheus_client", "contextlib",
    ),
    "log": ("gpulease_protocol/host/logging", "runtime/event_log", "logging/__init__"),
    "authentication and authorization": ("api/auth/", "gpulease_protocol/host"),
    "bodies and answers": ("pydantic", "api/request_body", "api/report_body", "api/lease_encoder", "api/problems"),
    "writer: turns, answers, wakeups, metrics": ("gpulease_server/runtime/",),
    "core: decide and settle": ("decide (gpulease_server/core/", "settle (gpulease_server/core/"),
    "store: rows and statements": ("gpulease_server/store/", "sqlalchemy", "msgspec"),
}  # fmt: skip
"""By layer, what the file of a frame has in its name."""
LOOP = "event loop"
"""Where no frame belongs to a layer: uvloop, asyncio."""


def profile(running: InstalledDaemon, pattern: str, seconds: int = SECONDS) -> list[tuple[tuple[str, ...], int]]:
    """Stacks, outermost frame first, and how many samples each has."""
    load = Load(pattern=pattern, port=running.port, clients=CLIENTS, seconds=seconds + 4.0)
    with tempfile.NamedTemporaryFile() as found:
        command = ["py-spy", "record", "--gil", "-f", "raw", "-r", str(RATE_HZ), "-d", str(seconds), "-o", found.name]
        command[0] = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
        with subprocess.Popen(
            [*command, "-F", "-p", str(running.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as spy:
            measured(load)
            _, errors = spy.communicate(timeout=120)
        assert spy.returncode == 0, errors
        lines = Path(found.name).read_text().splitlines()
    return [(tuple(stack.split(";")), int(count)) for stack, _, count in (line.rpartition(" ") for line in lines)]


def layer_of(stack: tuple[str, ...]) -> str:
    """The layer of a sample."""
    for frame in reversed(stack):
        for layer, parts in LAYERS.items():
            if any(part in frame for part in parts):
                return layer
    return LOOP


def main() -> None:
    """Print the shares of both requests."""
    shares: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as place, installed(Path(place), "--simulate", str(GPUS)) as running:
        for pattern in ("renewals", "leases"):
            shares[pattern] = Counter()
            for stack, count in profile(running, pattern):
                shares[pattern][layer_of(stack)] += count
    sys.stdout.write("| layer | renew | acquire + release |\n| --- | --- | --- |\n")
    for layer in (*LAYERS, LOOP):
        cells = (f"{found[layer] / found.total():.1%}" for found in shares.values())
        sys.stdout.write(f"| {layer} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
