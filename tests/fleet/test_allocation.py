"""The batch script of docs/howto/slurm.md, in which a daemon of one's own has the GPUs of one allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon import eventually
from tests.docs.pages import ROOT, blocks
from tests.fleet import slurm_cluster as clusters
from tests.fleet.slurm_cluster import slurm_cluster

TRAINING = """
import os
with open("done-" + os.environ["GPULEASE_LEASE_ID"], "w") as file:
    print(os.environ["GPULEASE_URL"], os.environ["CUDA_VISIBLE_DEVICES"], file=file)
"""


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(place)}


def script() -> str:
    """The script, with an array of two."""
    (text,) = [block.text for block in blocks(ROOT / "docs/howto/slurm.md") if "#SBATCH --gres" in block.text]
    assert text.count("0-99") == text.count("gpu:8") == 1
    return text.replace("0-99", "0-1").replace("gpu:8", "gpu:4")


def test_the_script_ends_where_its_daemon_cannot_start(tmp_path: Path) -> None:
    """An allocation of eight GPUs is not kept for a daemon that never comes."""
    broken = environment(tmp_path) | {"GPULEASE_SIMULATE": str(tmp_path / "nowhere.json")}
    ran = subprocess.run(
        ["bash", "-c", script()], cwd=tmp_path, env=broken, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "nowhere.json" in ran.stderr


@pytest.mark.slow
@pytest.mark.budget(120)
@pytest.mark.xdist_group("slurm")
@pytest.mark.skipif(clusters.missing() is not None, reason=str(clusters.missing()))
@pytest.mark.skipif(not clusters.has_freezer(), reason="no cgroups of version 1 for proctrack/cgroup")
def test_two_allocations_on_a_node_have_a_daemon_and_gpus_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPULEASE_")]:
        monkeypatch.delenv(name)
    for name, value in (environment(tmp_path) | {"GPULEASE_SIMULATE": "8"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "batch.sh").write_text(script())
    (tmp_path / "train.py").write_text(TRAINING)
    with slurm_cluster(tmp_path / "slurm", 1, prefix="a") as cluster:
        for _ in range(2):
            cluster.run("sbatch", f"--chdir={tmp_path}", f"--output={tmp_path}/%j.out", str(tmp_path / "batch.sh"))

        def said() -> str:
            return "\n".join(file.read_text() for file in tmp_path.glob("*.out")) + cluster.story()

        eventually(lambda: not cluster.jobs(), 110, said)
        ended = cluster.run("scontrol", "--oneliner", "show", "job")
    assert ended.count("JobState=COMPLETED") == 2, said()
    done = [file.read_text().split() for file in tmp_path.glob("done-*")]
    assert len(done) == 4, said()
    gpus: dict[str, set[str]] = {}
    for url, gpu in done:
        gpus.setdefault(url, set()).add(gpu)
    assert len(gpus) == 2, "each allocation's trials are with its own daemon"
    one, other = gpus.values()
    assert not one & other
