"""What systemd is told by a service of `Type=notify`: ready, stopping, and still alive. Nothing where nobody listens.

The protocol is one datagram to the socket that `NOTIFY_SOCKET` names (sd_notify(3)), so it needs no library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""They are for this process; nothing that it starts may speak in its name."""


def tell(state: str) -> None:
    """Send `READY=1`, `STOPPING=1` or the like. An address that nobody listens on is no failure of the service."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    place = f"\0{address[1:]}" if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)
        sender.sendto(state.encode(), place)


async def watchdog() -> None:
    """Say twice per `WATCHDOG_USEC` that the event loop turns; return at once where no watchdog is set."""
    asked_us = os.environ.get("WATCHDOG_USEC", "")
    if not asked_us.isdecimal() or int(asked_us) == 0:
        return
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        tell("WATCHDOG=1")
        await asyncio.sleep(int(asked_us) / 2e6)
