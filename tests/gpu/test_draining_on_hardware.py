"""Real GPUs, from the end of a lease to the next grant: which processes keep a GPU, and which do not."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.model import GpuReading
from gpulease_server.core.policy import Policy
from tests.daemon import DaemonProcess, eventually
from tests.gpu.conftest import state
from tests.gpu.subjects import Subject

TAKEN_BYTES = 2 * 1024**3
SOON_S = 20.0
"""How long a GPU without any process may drain, on a busy machine too."""
RETAINED_S = Policy().retained_memory_s


def lease(running: DaemonProcess, uuid: str) -> dict[str, Any]:
    granted = running.call("POST", "/v1/leases?wait_s=30", {"devices": [uuid], "ttl_s": 600})
    assert granted.status == 201, granted.content
    return dict(granted.json)


def release(running: DaemonProcess, held: dict[str, Any]) -> None:
    given = running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
    assert given.status == 200, given.content


def refused(running: DaemonProcess, uuid: str) -> bool:
    """True if the GPU is not granted now."""
    return running.call("POST", "/v1/leases?wait_s=10", {"devices": [uuid], "queue": False}).status == 409


def keeps(running: DaemonProcess, uuid: str) -> bool:
    """True if the tests' memory is in use, or if the driver does not tell."""
    used = running.call("GET", f"/v1/gpus/{uuid}").json["memory_used_bytes"]
    return used is None or used >= TAKEN_BYTES


def is_free(running: DaemonProcess, uuid: str, within_s: float) -> None:
    eventually(
        lambda: state(running, uuid) == "free",
        within_s,
        lambda: f"{running.call('GET', f'/v1/gpus/{uuid}').content!r}; {running.story()}",
    )


def test_a_gpu_whose_holder_was_killed_is_free_once_its_memory_is_back(running: DaemonProcess, gpu: GpuReading) -> None:
    held = lease(running, gpu.uuid)
    with Subject(mask=gpu.uuid, lease=held["id"]) as holder:
        holder.do("memory", TAKEN_BYTES)
        release(running, held)
        assert refused(running, gpu.uuid), "it drains"
        holder.kill()
    is_free(running, gpu.uuid, SOON_S)
    seen = running.call("GET", f"/v1/gpus/{gpu.uuid}").json
    assert not seen["processes"]
    assert (seen["memory_used_bytes"] or 0) < TAKEN_BYTES


def test_the_forked_worker_of_a_killed_rank_keeps_the_gpu_until_it_ends(
    running: DaemonProcess, gpu: GpuReading
) -> None:
    held = lease(running, gpu.uuid)
    with Subject(mask=gpu.uuid, lease=held["id"]) as rank:
        rank.do("memory", TAKEN_BYTES)
        rank.do("fork")
        rank.kill()
        release(running, held)
        assert refused(running, gpu.uuid)
        eventually(lambda: keeps(running, gpu.uuid), SOON_S, lambda: "the worker has not what the dead rank had")
        assert state(running, gpu.uuid) == "draining"
        rank.end_forked()
        is_free(running, gpu.uuid, SOON_S)


@pytest.mark.parametrize("marker", [None, "lease-of-someone-else"], ids=["no lease", "another marker"])
def test_who_opens_nvml_with_the_gpu_masked_away_does_not_keep_it_draining(
    running: DaemonProcess, gpu: GpuReading, marker: str | None
) -> None:
    held = lease(running, gpu.uuid)
    with Subject(mask="", lease=marker) as stranger:
        stranger.do("nvml")  # as NCCL does, exporters, and torch when it counts devices: on every GPU
        release(running, held)
        is_free(running, gpu.uuid, RETAINED_S + SOON_S)
        assert stranger.process.poll() is None
