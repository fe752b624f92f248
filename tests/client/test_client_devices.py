from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpulease import Client, Gpu, GpuState, Node, NodeState, UnknownOrdinals, find_usable_cuda_devices, reserved_leases
from gpulease.cuda import libcuda
from tests.client.fake_daemon import FakeDaemon
from tests.client.stand_in_cuda import no_cuda


def machine(daemon: FakeDaemon, *names: str | None) -> None:
    """GPUs of these names on this host, of which the first (GPU-0) is the one that the stand-in grants."""
    daemon.gpus = [
        Gpu(uuid=f"GPU-{index}", node="a", index=index, name=name, state=GpuState.FREE)
        for index, name in enumerate(names)
    ]
    host = socket.gethostname()
    daemon.nodes = [Node(name="a", host=host, state=NodeState.READY, gpu_count=len(names), simulated=True)]


@pytest.fixture
def order(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Sets CUDA_DEVICE_ORDER and the mask; takes back what is put into the environment, and gives back the GPUs.

    There is no CUDA that could be asked.
    """
    no_cuda(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def put(value: str | None, mask: str | None = None) -> None:
        for name, text in (("CUDA_DEVICE_ORDER", value), ("CUDA_VISIBLE_DEVICES", mask)):
            monkeypatch.setenv(name, text or "")
            if text is None:
                monkeypatch.delenv(name)

    for name in ("GPULEASE_LEASE_ID", "GPULEASE_LEASE_TOKEN", "GPULEASE_FOUND_BY"):
        monkeypatch.setenv(name, "")
    yield put
    for held in reserved_leases():
        held.release()


@pytest.mark.parametrize(
    ("names", "mask"), [(("slow", "fast"), None), (("slow", "fast", "fast"), "1,2"), ((None, None), None)]
)
def test_fastest_first_on_mixed_gpus_is_refused_before_leasing(daemon, client, order, names, mask):
    machine(daemon, *names)
    order("FASTEST_FIRST", mask)
    with pytest.raises(UnknownOrdinals, match=r"'FASTEST_FIRST'.*Set CUDA_DEVICE_ORDER=PCI_BUS_ID") as refused:
        find_usable_cuda_devices(1, client=client)
    assert isinstance(refused.value, RuntimeError)
    assert not daemon.leases


@pytest.mark.parametrize(
    ("names", "value", "mask", "set_to"),
    [
        (("slow", "fast"), None, None, "PCI_BUS_ID"),
        (("slow", "fast"), "", None, "PCI_BUS_ID"),
        (("slow", "fast"), "PCI_BUS_ID", None, "PCI_BUS_ID"),
        (("same", "same"), "FASTEST_FIRST", None, "FASTEST_FIRST"),
        ((None,), "FASTEST_FIRST", None, "FASTEST_FIRST"),
        (("slow", "fast"), "FASTEST_FIRST", "GPU-0,GPU-1", "FASTEST_FIRST"),
    ],
)
def test_gpus_are_found_if_the_order_is_known(daemon, client: Client, order, names, value, mask, set_to) -> None:
    machine(daemon, *names)
    order(value, mask)
    assert find_usable_cuda_devices(1, client=client) == [0]
    assert os.environ["CUDA_DEVICE_ORDER"] == set_to


def test_without_visible_gpus_their_order_does_not_matter(daemon: FakeDaemon, client: Client, order) -> None:
    machine(daemon, "slow", "fast")
    order("FASTEST_FIRST", "")
    with pytest.raises(ValueError, match="no visible CUDA devices"):
        find_usable_cuda_devices(1, client=client)


@pytest.mark.parametrize(("command", "wait_s", "found"), [("true", 60, True), ("true", 0, False), ("cat", 60, False)])
def test_cuda_is_asked_again_if_it_was_slow_and_the_call_waits_but_not_if_it_hangs(
    daemon: FakeDaemon, client: Client, order, monkeypatch, command: str, wait_s: float, found: bool
) -> None:
    machine(daemon, "slow", "fast")
    order("FASTEST_FIRST")
    with subprocess.Popen([command], stdin=subprocess.PIPE) as process:
        if command == "true":
            process.wait()
        answers: list[list[str] | Exception] = [libcuda.CudaTimeout("it is slow", process), ["GPU-0", "GPU-1"]]

        def query(*_: object) -> list[str]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(libcuda, "query_devices", query)
        with nullcontext() if found else pytest.raises(UnknownOrdinals, match="it is slow"):
            assert find_usable_cuda_devices(1, wait_s=wait_s, client=client) == [0]
    assert len(answers) == (0 if found else 1)
