"""Compares what a daemon on the stand-in machine reports with what is true."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from tests.daemon import DaemonProcess, events, eventually
from tests.driver.machine import UUIDS, DriverMachine

PROMPT_S = 4.0
"""A GPU is granted again within this time after its former holder's last process is gone: a reading of 8 GPUs takes
some 150 ms here, and the machine that runs the tests is slow and busy."""

RETAINED_S = 6.0
"""The daemon's `--retained-memory-s`: how long a stranger's open device file may delay."""


def gpu(running: DaemonProcess, index: int) -> dict[str, Any]:
    """A GPU as the API shows it."""
    return dict(running.call("GET", f"/v1/gpus/{UUIDS[index]}").json)


def states(running: DaemonProcess) -> list[str]:
    """The state of every GPU, in PCI order."""
    return [one["state"] for one in running.call("GET", "/v1/gpus").json["items"]]


def reason(running: DaemonProcess, index: int) -> str:
    """Why a GPU is in its state."""
    return str(gpu(running, index)["reason"])


def take(running: DaemonProcess, *indices: int, **members: Any) -> dict[str, Any]:
    """A lease on these GPUs, which is granted immediately."""
    answer = running.call("POST", "/v1/leases", {"devices": [UUIDS[index] for index in indices], **members})
    assert answer.status == 201, f"{answer.content!r}; {running.story()}"
    return dict(answer.json)


def release(running: DaemonProcess, held: dict[str, Any]) -> None:
    """Release a lease."""
    assert running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]}).status == 200


def clean_events(running: DaemonProcess) -> dict[tuple[str, int], dict[str, Any]]:
    """The event by which each GPU became clean after each lease."""
    return {
        (event["lease_id"], UUIDS.index(uuid)): event
        for event in events(running)
        if event["kind"] == "gpu.clean"
        for uuid in event["gpus"]
    }


def monotonic_s(at: str) -> float:
    """The time of an event on the monotonic clock."""
    while True:
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        if after_s - before_s < 0.002:  # else this process was stopped between the two
            return datetime.fromisoformat(at).timestamp() - wall_s + after_s


def delay_s(running: DaemonProcess, machine: DriverMachine, held: dict[str, Any], index: int) -> float:
    """Seconds from when the last of a lease was gone until its GPU was clean; negative if before. Does not wait."""
    gone_s = machine.gone_at_s(held["id"], index)
    assert gone_s is not None, f"something of it is left: {machine.left_of(held['id'], index)}"
    return monotonic_s(clean_events(running)[held["id"], index]["at"]) - gone_s


def drains(
    running: DaemonProcess, machine: DriverMachine, held: dict[str, Any], index: int, within_s: float = PROMPT_S
) -> None:
    """Assert that the GPU becomes clean soon after the last of the lease is gone, and not before."""
    eventually(lambda: machine.gone_at_s(held["id"], index) is not None, 60)
    gone_s = machine.gone_at_s(held["id"], index)
    assert gone_s is not None
    eventually(
        lambda: (held["id"], index) in clean_events(running),
        max(0.0, gone_s + within_s - time.monotonic()),
        lambda: f"GPU {index} still drains: {reason(running, index)}; {running.story()}",
    )
    assert delay_s(running, machine, held, index) > -0.01, "it was reported clean while something was left"
