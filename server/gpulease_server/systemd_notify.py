"""Notifies systemd, for a service of `Type=notify`: ready, stopping, watchdog. Does nothing outside such a service.

The protocol is one datagram to the socket in `NOTIFY_SOCKET` (sd_notify(3)), so it needs no library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Meant for this process only; not passed on to its children."""


def notify(state: str) -> None:
    """Send `READY=1`, `STOPPING=1` or the like. A missing listener is ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    place = f"\0{address[1:]}" if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)
        sender.sendto(state.encode(), place)


async def watchdog() -> None:
    """Send a watchdog message twice per `WATCHDOG_USEC`; returns at once if no watchdog is set."""
    interval_us = os.environ.get("WATCHDOG_USEC", "")
    if not interval_us.isdecimal() or int(interval_us) == 0:
        return
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(interval_us) / 2e6)
