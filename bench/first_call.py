"""What does a script pay for asking gpulease: to import it, and for its first call?

Every figure is of fresh processes, in turns, so that a busy machine is busy for all of them. The limits beside it: what
`import httpx2` costs (the HTTP library underneath), and what three bare requests to the same daemon take on a new
connection of the standard library, for the call makes three (the GPUs, the nodes, the lease).
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpulease import Client, GpuState
from tests.daemon import DaemonProcess, eventually

ROUNDS = 25

CALL = """
import time
from gpulease import find_usable_cuda_devices
begun = time.perf_counter()
find_usable_cuda_devices(1, wait_s=20)
print((time.perf_counter() - begun) * 1e3)
"""
WHOLE = """
import time
begun = time.perf_counter()
from gpulease import find_usable_cuda_devices
find_usable_cuda_devices(1, wait_s=20)
print((time.perf_counter() - begun) * 1e3)
"""
BARE = """
import http.client, os, socket, time
begun = time.perf_counter()
connection = http.client.HTTPConnection("gpulease")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(os.environ["GPULEASE_URL"].removeprefix("unix://"))
for _ in range(3):
    connection.request("GET", "/healthz")
    connection.getresponse().read()
print((time.perf_counter() - begun) * 1e3)
"""


def script(program: str, url: str) -> float:
    """Milliseconds that a fresh process says its call took."""
    environment = {"GPULEASE_URL": url, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout)


def import_ms(module: str) -> float:
    """Milliseconds of `python -X importtime -c "import MODULE"`, what it imports included."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    total_us = re.findall(rf"^import time: +[0-9]+ \| +([0-9]+) \| {module}$", done.stderr, re.MULTILINE)
    return int(total_us[-1]) / 1e3


def main() -> None:
    """Print the table of bench/README.md."""
    rows: dict[str, list[float]] = {
        name: []
        for name in (
            "import gpulease (-X importtime)",
            "import httpx2 (-X importtime)",
            "first call, after `from gpulease import ...`",
            "import and first call together",
            "three bare requests on a new connection",
        )
    }
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", "4").start()
        url = f"unix://{running.socket}"
        try:
            with Client(url) as client:
                for _ in range(ROUNDS):
                    figures = [import_ms("gpulease"), import_ms("httpx2")]
                    for program in (CALL, WHOLE, BARE):
                        eventually(lambda: {gpu.state for gpu in client.gpus()} == {GpuState.FREE}, 30)
                        figures.append(script(program, url))
                    for row, figure in zip(rows.values(), figures, strict=True):
                        row.append(figure)
        finally:
            running.stop()
    print(f"{'':<46}{'median ms':>9}{'p90 ms':>9}")
    for name, row in rows.items():
        print(f"{name:<46}{statistics.median(row):>9.1f}{sorted(row)[int(len(row) * 0.9)]:>9.1f}")


if __name__ == "__main__":
    main()
