"""`async_client.py` is generated from `client.py`. `python -m tests.client.test_async_client_source` writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "client" / "gpulease" / "client.py"
ASYNC_CLIENT = CLIENT.with_name("async_client.py")
REPLACEMENTS = {
    # Module
    r'\A""".*?"""': (
        '"""`AsyncClient`: `Client` for event loops. Generated from `client.py` by'
        ' `tests/client/test_async_client_source.py`."""'
    ),
    r"import operator\n": "",
    r"import Callable, Iterable, Iterator, Mapping": "import AsyncIterator, Callable, Iterable, Mapping",
    r"from gpulease\.cuda import ranks\n": (
        "from gpulease.cuda import ranks\n"
        "from gpulease.async_lease import AsyncLease, OnLost, PendingLease\n"
        "from gpulease.client import Client\n"
        "from gpulease.sansio.async_transport import AsyncTransport\n"
    ),
    r" +from gpulease\.lease import HeldLease\b.*?\n\n?": "",
    r"from gpulease\.sansio\.sync_transport .*?\n": "",
    r"\n\n\n@brief_errors\ndef find_usable_cuda_devices.*\Z": "\n",
    r"    def find_usable_cuda_devices.*?(?=    # )": "",
    # Class
    r"class Client\(ReservationMethods\):": "class AsyncClient(AsyncReservationMethods):",
    r"import ReservationMethods\n": "import AsyncReservationMethods\n",
    r"A client of a daemon\. Safe to use from several threads, and in a forked child\.": (
        "`Client` for event loops: the same methods with the same arguments. For one event loop at a time."
    ),
    r"with gpulease\.Client\(\) as client:": "async with gpulease.AsyncClient() as client:",
    r"in client\.gpus\(\)": "in await client.gpus()",
    r"with client\.lease\(": "async with client.lease(",
    r"( +)subprocess\.run\(command, env=lease\.environ\(\)\)": (
        r"\1process = await asyncio.create_subprocess_exec(*command, env=lease.environ())\n\1await process.wait()"
    ),
    r"= Transport\(destination\)\n": (
        "= AsyncTransport(destination)\n        self._renewing = Client.for_destination(destination, retry_s)\n"
    ),
    r"self\._transport\.close\(\)\n": "await self._transport.close()\n        self._renewing.close()\n",
    r"        self\.close\(\)": "        await self.close()",
    r"__(enter|exit)__": r"__a\1__",
    # Leases
    r"is lost, in a thread\.": "is lost, in the event loop, and may be a coroutine function.",
    r"Callable\[\[HeldLease\], None\] \| None": "OnLost | None",
    r"(shared_key: str \| None = None,\n    \)) -> HeldLease:": r"\1 -> PendingLease:",
    r"-> HeldLease:": "-> AsyncLease:",
    r"return self\._acquire\((.*?)\)\n": r"return PendingLease(lambda: self._acquire(\1))\n",
    r"HeldLease, self,": "AsyncLease, self._renewing,",
    # Jobs
    r"client\.submit\(gp": "await client.submit(gp",
    r"print\(client\.wait_job\(job\.id\)\.exit_code\)": "print((await client.wait_job(job.id)).exit_code)",
    # Calls
    r"Iterator\[(?=Event|str)": "AsyncIterator[",
    r"(?<!def )self\.(send|_transport\.run)\(": r"await self.\1(",
}
"""Patterns of `client.py`, each of which occurs, and what replaces them."""


def is_coroutine(method: str) -> bool:
    """True if this method of the asynchronous client awaits something, or must be awaited."""
    return "await " in re.sub(r'""".*?"""', "", method, flags=re.DOTALL) or "def __aenter__" in method


def source() -> str:
    """What `async_client.py` has to contain."""
    text = CLIENT.read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS.items():
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count, f"{pattern} does not occur in client.py"
    methods = re.split(r"(?m)^(?=    (?:def|@|#))", text)
    text = "".join(
        method.replace("    def ", "    async def ", 1) if is_coroutine(method) else method for method in methods
    )
    for command in ("check --select I,F401 --fix", "format"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--quiet", "--stdin-filename", str(ASYNC_CLIENT), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def test_async_client_is_generated_from_client() -> None:
    written = ASYNC_CLIENT.read_text(encoding="utf-8")
    assert written == source(), "client.py has changed: run `python -m tests.client.test_async_client_source`"


if __name__ == "__main__":
    ASYNC_CLIENT.write_text(source(), encoding="utf-8")
