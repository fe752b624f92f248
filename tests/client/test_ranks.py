"""Who counts as a rank of which launcher, on trees of processes made up under another root than /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulease import ranks
from gpulease.owner import Owner

LAUNCHER, SHELL = os.getppid(), 1
"""The launcher must be a living process, for its start time."""
FURTHER = " 0" * 17
"""The fields of /proc/PID/stat after the process group."""
RANK = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}


def tree(proc: Path, *processes: tuple[int, int, dict[str, str]]) -> Path:
    """A /proc of these processes: pid, parent, and the environment that each was started with."""
    for pid, parent, environment in processes:
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 0{FURTHER}")
        entries = "\0".join(f"{name}={value}" for name, value in environment.items())
        (proc / str(pid) / "environ").write_text(entries)
    return proc


@pytest.mark.parametrize(
    "own",
    [
        RANK,
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
        {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_SIZE": "2"},
    ],
)
def test_a_rank_has_the_process_that_started_it_as_its_launcher(tmp_path: Path, own: dict[str, str]) -> None:
    assert ranks.launcher(tree(tmp_path, (os.getpid(), LAUNCHER, own), (LAUNCHER, SHELL, {}))) == Owner.of(LAUNCHER)


def test_what_a_rank_starts_belongs_with_the_rank(tmp_path: Path) -> None:
    between = 4000000
    proc = tree(tmp_path, (os.getpid(), between, RANK), (between, LAUNCHER, RANK), (LAUNCHER, SHELL, {"A": "b"}))
    assert ranks.launcher(proc) == Owner.of(LAUNCHER)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2"},
        {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_a_process_on_its_own_has_no_launcher(tmp_path: Path, own: dict[str, str]) -> None:
    assert ranks.launcher(tree(tmp_path, (os.getpid(), LAUNCHER, own), (LAUNCHER, SHELL, {}))) is None


@pytest.mark.parametrize("meet", [{"MASTER_PORT": "29500"}, {"LOCAL_RANK": "1"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_a_launcher_that_was_itself_started_as_a_rank_is_still_the_launcher(tmp_path: Path, meet) -> None:
    """In a shell where somebody was debugging, or in a rank of another training."""
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, RANK | meet), (LAUNCHER, SHELL, RANK), (SHELL, 0, {}))
    assert ranks.launcher(proc) == Owner.of(LAUNCHER)


@pytest.mark.parametrize(
    ("name", "own", "group", "launches"),
    [
        ("systemd", {"TORCHELASTIC_RUN_ID": "x"}, 1, False),
        ("tini", {}, 1, False),
        ("bash", {}, 1, True),
        ("bash", {}, 7, False),
        ("python", {"TORCHELASTIC_RUN_ID": "x"}, 7, True),
    ],
)
def test_process_1_is_a_launcher_only_of_what_it_has_launched(
    tmp_path: Path, name: str, own: dict[str, str], group: int, launches: bool
) -> None:
    """Ranks of two scripts that have ended share this parent, and must not share a lease."""
    proc = tree(tmp_path, (os.getpid(), 1, RANK | own), (1, 0, {}))
    (proc / str(os.getpid()) / "stat").write_text(f"{os.getpid()} (python) S 1 {group}{FURTHER}")
    (proc / "1" / "stat").write_text(f"1 ({name}) S 0 1{FURTHER}")
    assert ranks.launcher(proc) == (Owner.of(1) if launches else None)


def test_a_rank_that_has_overwritten_its_environment_with_a_title_is_still_one(tmp_path: Path, monkeypatch) -> None:
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {}), (LAUNCHER, SHELL, {}))
    (proc / str(os.getpid()) / "environ").write_text("training: epoch 3\0\0\0\0")
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert ranks.launcher(proc) == Owner.of(LAUNCHER)


def test_a_process_of_which_nothing_can_be_read_has_no_launcher(tmp_path: Path) -> None:
    assert ranks.launcher(tmp_path) is None


def test_a_launcher_that_is_gone_is_none(tmp_path: Path) -> None:
    gone = 4194304 + 1  # over the greatest pid of Linux
    assert ranks.launcher(tree(tmp_path, (os.getpid(), gone, RANK), (gone, SHELL, {}))) is None


def test_the_key_is_that_of_one_launcher_one_mask_and_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(launched_by: Owner = Owner(7, 100), round_: int = 0, **own: str) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        return ranks.shared_key(launched_by, round_, tree(place, (os.getpid(), LAUNCHER, RANK | own)))

    keys = [
        key(),
        key(Owner(7, 101)),
        key(Owner(8, 100)),
        key(round_=1),
        key(MASTER_PORT="1"),
        key(MASTER_PORT="2"),
        key(TORCHELASTIC_RUN_ID="one"),
        key(TORCHELASTIC_RUN_ID="another"),
    ]
    assert key(TORCHELASTIC_RUN_ID="one", MASTER_PORT="3") == keys[-2]  # its ranks were restarted
    assert key() == keys[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_process_descends_from_those_above_it_and_from_no_other(tmp_path: Path) -> None:
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {}), (LAUNCHER, SHELL, {}))
    parent = Owner.of(LAUNCHER)
    assert parent is not None
    assert ranks.descends_from(parent, proc)
    assert not ranks.descends_from(Owner(parent.pid, 1), proc)
    assert not ranks.descends_from(Owner.this_process(), proc)
    assert not ranks.descends_from(Owner(2, 2), proc)
