"""Simulated GPUs: a plausible machine, a file that changes, invalid files, and real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import ComputeMode, GpuLink, GpuReading, LeaseState, Process
from gpulease_worker.probe import process_attribution
from gpulease_worker.probe.probe_protocol import ReadingFailed
from gpulease_worker.probe.simulation import PROCESS_BYTES, SimulatedReader
from gpulease_worker.processes.lease_cache import CachedLease
from tests.worker.build import GPUS, lease, under, until

GONE = 2**22 + 1
"""A pid that no kernel assigns: above the maximum pid_max."""


def written(path: Path, machine: object) -> str:
    path.write_text(machine if isinstance(machine, str) else json.dumps(machine))
    return str(path)


def test_a_count_is_a_plausible_machine_that_stays_the_same() -> None:
    reading = SimulatedReader("8", "a").read(())
    assert reading.simulated
    assert [gpu.index for gpu in reading.gpus] == list(range(8))
    assert len({gpu.uuid for gpu in reading.gpus}) == len({gpu.pci_bus_id for gpu in reading.gpus}) == 8
    assert all(gpu.node == "a" and gpu.memory_used_bytes == 0 and not gpu.processes for gpu in reading.gpus)
    assert all(gpu.uuid.startswith("GPU-") and gpu.uuid[4:] == gpu.uuid[4:].lower() for gpu in reading.gpus)
    assert SimulatedReader("8", "a").read(()) == reading


def test_two_nodes_differ_in_every_uuid() -> None:
    first, second = ({gpu.uuid for gpu in SimulatedReader("4", node).read(()).gpus} for node in "ab")
    assert not first & second


def test_a_file_is_read_again_at_every_reading(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    simulation = SimulatedReader(written(path, {"gpus": [{"uuid": GPUS[0], "temperature_c": 40}]}), "n")
    assert simulation.read(()).gpus[0].temperature_c == 40
    written(path, {"gpus": [{"uuid": GPUS[0], "temperature_c": 80, "health": "xid:79"}], "driver_version": "1.2"})
    reading = simulation.read(())
    assert (reading.gpus[0].temperature_c, reading.gpus[0].health, reading.driver_version) == (80, "xid:79", "1.2")


def test_every_field_of_the_file_reaches_the_reading_in_pci_order(tmp_path: Path) -> None:
    entry = {
        "uuid": "gpu-ABCD0000-0000-0000-0000-000000000000",
        "name": "Some GPU",
        "pci_bus_id": "00000000:1B:00.0",
        "memory_total_bytes": 100,
        "memory_used_bytes": 40,
        "utilization_ratio": 0.5,
        "temperature_c": 61,
        "power_w": 250.5,
        "compute_mode": "exclusive_process",
        "health": "lost",
        "warnings": ["row_remap_pending"],
        "numa_node": 1,
        "processes": [{"pid": GONE, "type": "graphics", "memory_bytes": 7, "user": "eva", "command": "Xorg"}],
    }
    earlier = {"uuid": GPUS[0], "pci_bus_id": "00000000:0a:00.0", "memory_used_bytes": None, "compute_mode": None}
    machine = {"gpus": [entry, earlier], "links": [[0, 1, "nvlink"]], "driver_version": "580", "hang_s": 0}
    reading = SimulatedReader(written(tmp_path / "m.json", machine), "n").read(())
    first, second = reading.gpus
    assert (first.uuid, first.index, first.memory_used_bytes, first.compute_mode) == (GPUS[0], 0, None, None)
    assert second == GpuReading(
        uuid="GPU-abcd0000-0000-0000-0000-000000000000",
        node="n",
        index=1,
        minor_number=1,
        pci_bus_id="00000000:1B:00.0",
        name="Some GPU",
        memory_total_bytes=100,
        memory_used_bytes=40,
        utilization_ratio=0.5,
        temperature_c=61,
        power_w=250.5,
        compute_mode=ComputeMode.EXCLUSIVE_PROCESS,
        health="lost",
        warnings=("row_remap_pending",),
        numa_node=1,
        processes=(Process(pid=GONE, type="graphics", memory_bytes=7, user="eva", command="Xorg"),),  # type: ignore[arg-type]
    )
    # The file counts its GPUs as it lists them; the report names them.
    assert reading.links == (GpuLink(first=second.uuid, second=first.uuid, path="nvlink", peer_to_peer=True),)


def test_an_applications_own_xid_is_no_ill_of_the_gpu(tmp_path: Path) -> None:
    machine = {"gpus": [{"uuid": GPUS[0], "health": "xid:94"}, {"uuid": GPUS[1], "health": "xid:109"}]}
    gpus = SimulatedReader(written(tmp_path / "m.json", machine), "n").read(()).gpus
    assert [gpu.health for gpu in gpus] == ["ok", "xid:109"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"gpus": [', "Expecting value"),
        ("[]", "the file must be an object"),
        ({}, "the file has no gpus"),
        ({"gpus": None}, "gpus must be a list"),
        ({"gpus": [3]}, "gpus[0] must be an object"),
        ({"gpus": [{}]}, "gpus[0] has no uuid"),
        ({"gpus": [{"uuid": 3}]}, "gpus[0]: uuid must be a string that begins with GPU-"),
        ({"gpus": [{"uuid": GPUS[0]}, {"uuid": GPUS[0].lower()}]}, f"two GPUs have the uuid {GPUS[0]}"),
        (
            {"gpus": [{"uuid": GPUS[0], "memory_used_bytes": "8"}]},
            "memory_used_bytes must be an integer number of bytes",
        ),
        (
            {"gpus": [{"uuid": GPUS[0], "memory_used_bytes": -1}]},
            "memory_used_bytes must be an integer number of bytes",
        ),
        ({"gpus": [{"uuid": GPUS[0], "utilization_ratio": 70}]}, "utilization_ratio must be a number from 0 to 1"),
        ({"gpus": [{"uuid": GPUS[0], "compute_mode": "none"}]}, "compute_mode must be one of"),
        ({"gpus": [{"uuid": GPUS[0], "compute_mode": ["default"]}]}, "compute_mode must be one of"),
        ({"gpus": [{"uuid": GPUS[0], "health": "ill"}]}, "health must be ok, lost"),
        ({"gpus": [{"uuid": GPUS[0], "warnings": ["ill"]}]}, "warnings must be a list of drain_p2p"),
        ({"gpus": [{"uuid": GPUS[0], "process": []}]}, "unknown field 'process'"),
        ({"gpus": [{"uuid": GPUS[0], "processes": [{"pid": True}]}]}, "gpus[0].processes[0]: pid must be a process id"),
        ({"gpus": [], "links": [[0, 1]]}, "links must be a list of [position of a GPU"),
        ({"gpus": [{"uuid": GPUS[0]}], "links": [[0, 1, "pcie"]]}, "links: [0, 1, ...] does not name two GPUs"),
        ({"gpus": [], "hang_s": -1}, "hang_s must be a number of seconds"),
        ('{"gpus": [{"uuid": "GPU-1", "power_w": NaN}]}', "NaN is not a number"),
        pytest.param("[" * 100_000, "is broken", id="nested too deeply"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ReadingFailed) as failed:
        SimulatedReader(written(path, content), "n").read(())
    assert str(path) in str(failed.value)
    assert complaint in str(failed.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadingFailed, match=r"absent\.json cannot be read: No such file"):
        SimulatedReader(str(tmp_path / "absent.json"), "n").read(())


def test_a_real_process_counts_on_the_gpus_of_its_lease_until_it_ends(tmp_path: Path) -> None:
    simulation = SimulatedReader(written(tmp_path / "m.json", {"gpus": [{"uuid": uuid} for uuid in GPUS]}), "n")
    mine, other = f"lease-{os.urandom(4).hex()}", f"lease-{os.urandom(4).hex()}"
    leases = (lease(mine, GPUS[1]), lease(other, GPUS[0]))
    with under(mine) as process:
        try:
            until(lambda: simulation.read(leases).gpus[1].processes, "the process is seen")
            idle, busy = simulation.read(leases).gpus
            assert not idle.processes
            (seen,) = busy.processes
            assert (seen.pid, seen.lease_id, seen.command) == (process.pid, mine, "sleep 60")
            assert seen.user is not None
            assert busy.memory_used_bytes == PROCESS_BYTES
            assert not simulation.read(()).gpus[1].processes, "a lease without GPUs here has no processes here"
        finally:
            process.kill()
        # Until it is reaped it is a zombie, which holds no GPU.
        until(lambda: not simulation.read(leases).gpus[1].processes, "a zombie does not count")
        assert simulation.read(leases).gpus[1].memory_used_bytes == 0


def test_a_listed_real_process_is_filled_in_and_attributed_by_its_ancestors_marker(tmp_path: Path) -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    note = tmp_path / "pid"
    # `env -u` takes the marker away: only the ancestor has it.
    script = f"env -u GPULEASE_LEASE_ID sleep 60 & echo $! > {note}; wait"
    with under(mine, "sh", "-c", script) as process:
        try:
            until(lambda: note.exists() and note.read_text().endswith("\n"), "the child is there")
            child = int(note.read_text())
            until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", "it has begun")
            machine = {"gpus": [{"uuid": GPUS[0], "processes": [{"pid": child, "memory_bytes": 5}]}]}
            reading = SimulatedReader(written(tmp_path / "m.json", machine), "n").read(())
            held = CachedLease(id=mine, state=LeaseState.ACTIVE, gpus=(GPUS[0],), uid=os.getuid())
            (gpu,) = process_attribution.attribute(reading, [held]).gpus
            (seen,) = gpu.processes
            assert (seen.lease_id, seen.command, seen.memory_bytes) == (mine, "sleep 60", 5)
            os.kill(child, 9)
        finally:
            process.kill()
