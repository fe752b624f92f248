"""A pool on three real slurmd: the first grant is fast, and whatever ends a pilot, no GPU is granted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import daemon, eventually
from tests.fleet import slurm_cluster as clusters
from tests.fleet.faults import WITHIN_S, Faults, strike, trainings, watched
from tests.fleet.fleet import Fleet
from tests.fleet.slurm_cluster import SlurmCluster, leftovers, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),  # nodes of the same name share their cgroups
    pytest.mark.skipif(clusters.missing() is not None, reason=str(clusters.missing())),
    pytest.mark.skipif(not clusters.has_freezer(), reason="no cgroups of version 1 for proctrack/cgroup"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm") as started:
        yield started


@pytest.fixture
def fleet(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Fleet]:
    with daemon(tmp_path, "--no-worker") as running:
        made = Fleet(running, tmp_path, cluster.environment, "--gres", "gpu:8", "--time", "24h")
        yield made
        cluster.run("scancel", "--user=root")
        eventually(lambda: not cluster.jobs(), WITHIN_S, cluster.story)


@pytest.mark.budget(60)
def test_a_pool_comes_up_grants_and_goes_down(cluster: SlurmCluster, fleet: Fleet) -> None:
    assert fleet.type("doctor", "--gres", "gpu:8", "--time", "24h").returncode == 0
    with fleet.up("--nodes", "3"):
        eventually(lambda: len(cluster.jobs()) >= 1, WITHIN_S, cluster.story)
        began = time.monotonic()
        lease = fleet.running.request_lease(2, wait_s=100)
        assert fleet.running.wait_active(lease["id"], 100)["gpus"]
        print(f"the first grant came {time.monotonic() - began:.1f} s after sbatch")
        eventually(lambda: sorted(fleet.ready()) == ["n1", "n2", "n3"], WITHIN_S, fleet.story)
        names = sorted(name for name, _, _ in cluster.jobs().values())
        assert names == ["gpulease:main:0:1", "gpulease:main:1:1", "gpulease:main:2:1"]
        fleet.running.release(lease)
    assert fleet.type("down", "--tick", "1s").returncode == 0
    assert fleet.nodes() == {}
    assert not cluster.jobs()
    eventually(lambda: not leftovers(fleet.place / "workers"), WITHIN_S)  # a worker whose pilot was killed finds out


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("scancel", "kill_stepd", "down"), id="it ends", marks=pytest.mark.budget(120)),
        pytest.param(("kill_worker", "requeue", "controller_away"), id="it goes on", marks=pytest.mark.budget(120)),
        pytest.param(("kill_slurmd", "time_limit"), id="Slurm takes a minute to notice", marks=pytest.mark.soak),
    ],
)
def test_no_gpu_is_granted_twice_whatever_happens_to_a_pilot(
    cluster: SlurmCluster, fleet: Fleet, names: tuple[str, ...]
) -> None:
    faults = Faults(cluster, fleet)
    with watched(fleet), fleet.up("--nodes", "3"):
        for place, name in enumerate(names):
            print(f"{name}: {strike(faults, name, cluster.nodes[place % 3]):.1f} s")
    assert fleet.type("down", "--tick", "1s").returncode == 0
    assert not trainings()
    eventually(lambda: not leftovers(fleet.place / "workers"), WITHIN_S)  # a worker whose pilot was killed finds out


@pytest.mark.budget(60)
def test_doctor_refuses_linuxproc(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path / "slurm", 1, proctrack="proctrack/linuxproc") as other, daemon(tmp_path) as running:
        fleet = Fleet(running, tmp_path, other.environment, "--gres", "gpu:8", "--time", "1h")
        refused = fleet.type("up", *fleet.options, "--nodes", "1")
        assert refused.returncode == 1
        assert "ProctrackType=proctrack/linuxproc" in refused.stdout
        wrong = fleet.type("doctor", "--gres", "gpu:9")
        assert "sbatch --test-only refuses a pilot with --gres=gpu:9" in wrong.stdout
