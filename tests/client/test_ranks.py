"""Who counts as a rank of which launcher, on trees of processes made up under another root than /proc."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease.cuda import ranks
from gpulease_protocol.errors import LeaseLost
from gpulease_protocol.host.process_id import ProcessId

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
def test_the_launcher_of_a_rank_is_the_process_that_started_it(tmp_path: Path, own: dict[str, str]) -> None:
    assert ranks.launcher_process(tree(tmp_path, (os.getpid(), LAUNCHER, own), (LAUNCHER, SHELL, {}))) == ProcessId.of(
        LAUNCHER
    )


def test_child_processes_of_a_rank_belong_to_the_rank(tmp_path: Path) -> None:
    between = 4000000
    proc = tree(tmp_path, (os.getpid(), between, RANK), (between, LAUNCHER, RANK), (LAUNCHER, SHELL, {"A": "b"}))
    assert ranks.launcher_process(proc) == ProcessId.of(LAUNCHER)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "two"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "²"},
        {"WORLD_SIZE": "2"},
        {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_an_independent_process_has_no_launcher(tmp_path: Path, own: dict[str, str]) -> None:
    assert ranks.launcher_process(tree(tmp_path, (os.getpid(), LAUNCHER, own), (LAUNCHER, SHELL, {}))) is None


@pytest.mark.parametrize("meet", [{"MASTER_PORT": "29500"}, {"LOCAL_RANK": "1"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_a_launcher_that_was_itself_started_as_a_rank_is_still_the_launcher(tmp_path: Path, meet) -> None:
    """In a shell used for debugging, or in a rank of another training."""
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, RANK | meet), (LAUNCHER, SHELL, RANK), (SHELL, 0, {}))
    assert ranks.launcher_process(proc) == ProcessId.of(LAUNCHER)


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
def test_process_1_is_a_launcher_only_of_processes_that_it_started(
    tmp_path: Path, name: str, own: dict[str, str], group: int, launches: bool
) -> None:
    """Ranks of two scripts that have ended share this parent, and must not share a lease."""
    proc = tree(tmp_path, (os.getpid(), 1, RANK | own), (1, 0, {}))
    (proc / str(os.getpid()) / "stat").write_text(f"{os.getpid()} (python) S 1 {group}{FURTHER}")
    (proc / "1" / "stat").write_text(f"1 ({name}) S 0 1{FURTHER}")
    assert ranks.launcher_process(proc) == (ProcessId.of(1) if launches else None)


def test_a_rank_that_has_set_its_process_title_is_still_a_rank(tmp_path: Path, monkeypatch) -> None:
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {}), (LAUNCHER, SHELL, {}))
    (proc / str(os.getpid()) / "environ").write_text("training: epoch 3\0\0\0\0")
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert ranks.launcher_process(proc) == ProcessId.of(LAUNCHER)


def test_an_unreadable_process_has_no_launcher(tmp_path: Path) -> None:
    assert ranks.launcher_process(tmp_path) is None


def test_a_launcher_that_has_exited_is_none(tmp_path: Path) -> None:
    gone = 4194304 + 1  # over the greatest pid of Linux
    assert ranks.launcher_process(tree(tmp_path, (os.getpid(), gone, RANK), (gone, SHELL, {}))) is None


def test_the_shared_key_depends_on_launcher_mask_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(launched_by: ProcessId = ProcessId(7, 100), round_: int = 0, **own: str) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        return ranks.shared_key(launched_by, round_, tree(place, (os.getpid(), LAUNCHER, RANK | own)))

    keys = [
        key(),
        key(ProcessId(7, 101)),
        key(ProcessId(8, 100)),
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


class Pool:
    """What `multiprocessing.process` shows a child of this parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def parent_process(self) -> Pool:
        return self


@pytest.fixture
def gone() -> ProcessId:
    """A process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        found = ProcessId.of(process.pid)
        process.kill()
    assert found is not None
    return found


def forked_by(parent: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a child that the parent's multiprocessing has started."""
    monkeypatch.setattr(ranks, "_find_pool_parent", lambda: parent)
    monkeypatch.setattr(ranks, "_pool_parent", None)


def test_a_rank_that_multiprocessing_started_is_told_its_rank_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's notebook_launcher, torch's start_processes."""
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {"A": "b"}), (LAUNCHER, SHELL, {"A": "b"}))
    notebook = ProcessId.of(LAUNCHER)
    assert notebook is not None
    forked_by(notebook, monkeypatch)
    assert ranks.forking_launcher(proc) is None, "the worker of a pool"
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert ranks.forking_launcher(proc) == notebook
    monkeypatch.setenv("MASTER_PORT", "1")
    first = ranks.shared_key(notebook, 0, proc)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.shared_key(notebook, 0, proc) == first, "the same in each rank"
    monkeypatch.setenv("MASTER_PORT", "2")
    assert ranks.shared_key(notebook, 0, proc) != first, "and another in another training"


def test_a_child_of_a_pool_that_a_rank_started_belongs_to_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = os.getppid()
    proc = tree(tmp_path, (os.getpid(), rank, RANK), (rank, 4000000, RANK), (4000000, SHELL, {}))
    forked_by(ProcessId(rank, 1), monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.forking_launcher(proc) is None


def test_the_parent_of_a_child_of_multiprocessing_is_known_dead_or_alive(
    monkeypatch: pytest.MonkeyPatch, gone: ProcessId
) -> None:
    monkeypatch.setitem(sys.modules, "multiprocessing.process", Pool(os.getppid()))
    assert ranks._find_pool_parent() == ProcessId.of(os.getppid())
    monkeypatch.setitem(sys.modules, "multiprocessing.process", Pool(gone.pid))
    found = ranks._find_pool_parent()
    assert found is not None
    assert not found.alive()
    monkeypatch.delitem(sys.modules, "multiprocessing.process")
    assert ranks._find_pool_parent() is None
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "joblib.externals.loky.backend.popen_loky_posix"])
    assert ranks._find_pool_parent() == ProcessId.of(os.getppid())


@pytest.mark.parametrize(
    ("program", "is_child"),
    [
        pytest.param("from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", True, id="spawn"),
        pytest.param("from multiprocessing.forkserver import main; main(5, 6, [])", True, id="fork server"),
        pytest.param(
            "import sys; from multiprocessing.forkserver import main; main(5, 6, ['__main__'], sys_argv=sys.argv[1:])",
            True,
            id="fork server of Python 3.14",
        ),
        pytest.param("from multiprocessing import Pool; main()", False, id="a program that uses multiprocessing"),
    ],
)
def test_what_multiprocessing_starts_is_known_while_it_imports_the_main_module(
    monkeypatch: pytest.MonkeyPatch, program: str, *, is_child: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-I", "-c", program, "--multiprocessing-fork"])
    assert ranks.is_rank({}) is is_child


@pytest.mark.parametrize("reaper", ["systemd", "process 1"])
def test_a_child_of_joblib_that_was_adopted_before_it_asked_is_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaper: str
) -> None:
    """Its parent was killed while it imported torch. It would wait for work, with a GPU, for minutes."""
    parent = os.getppid() if reaper == "systemd" else 1
    proc = tree(tmp_path, (os.getpid(), parent, {}), (parent, 0, {}))
    name = "systemd" if reaper == "systemd" else "sh"
    (proc / str(parent) / "stat").write_text(f"{parent} ({name}) S 0 {parent}{FURTHER}")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "joblib.externals.loky.backend.popen_loky_posix"])
    found = ranks._find_pool_parent(proc)
    assert found == ranks.ENDED_PROCESS
    assert not found.alive()
    monkeypatch.setattr(ranks, "_pool_parent", (os.getpid(), found))
    with pytest.raises(LeaseLost, match="The process that started this one"):
        ranks.check_not_orphaned(proc)


def test_the_child_of_a_pool_whose_parent_has_ended_is_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: ProcessId
) -> None:
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {}), (LAUNCHER, SHELL, {}))
    alive = ProcessId.of(LAUNCHER)
    assert alive is not None
    forked_by(alive, monkeypatch)
    ranks.check_not_orphaned(proc)
    forked_by(gone, monkeypatch)
    with pytest.raises(LeaseLost, match=f"Process {gone.pid} that started this one"):
        ranks.check_not_orphaned(proc)


def test_a_rank_of_torchrun_that_a_reaper_has_adopted_is_an_orphan_and_a_program_of_its_own_is_none(
    tmp_path: Path,
) -> None:
    def adopted(place: Path, own: dict[str, str]) -> Path:
        place.mkdir()
        proc = tree(place, (os.getpid(), 1, own), (1, 0, {}))
        (proc / "1" / "stat").write_text(f"1 (systemd) S 0 1{FURTHER}")
        return proc

    with pytest.raises(LeaseLost):
        ranks.check_not_orphaned(adopted(tmp_path / "torchrun", RANK | {"TORCHELASTIC_RUN_ID": "x"}))
    ranks.check_not_orphaned(adopted(tmp_path / "nohup", {}))
    ranks.check_not_orphaned(adopted(tmp_path / "by-hand", RANK))


def test_a_rank_whose_finder_has_ended_is_an_orphan_unless_another_launcher_is_between(
    tmp_path: Path, gone: ProcessId
) -> None:
    """Lightning's rank 1, whose rank 0 was killed while it imports; and a training that such a program started."""
    found = RANK | {"GPULEASE_FOUND_BY": f"{gone.pid}:{gone.start_ticks}"}
    (tmp_path / "a").mkdir()
    with pytest.raises(LeaseLost, match=f"Process {gone.pid}"):
        ranks.check_not_orphaned(tree(tmp_path / "a", (os.getpid(), LAUNCHER, found), (LAUNCHER, SHELL, {})))
    (tmp_path / "b").mkdir()
    inherited = {"GPULEASE_FOUND_BY": found["GPULEASE_FOUND_BY"]}
    ranks.check_not_orphaned(tree(tmp_path / "b", (os.getpid(), LAUNCHER, found), (LAUNCHER, SHELL, inherited)))
    (tmp_path / "c").mkdir()
    living = ProcessId.of(LAUNCHER)
    assert living is not None
    alive = RANK | {"GPULEASE_FOUND_BY": f"{living.pid}:{living.start_ticks}"}
    ranks.check_not_orphaned(tree(tmp_path / "c", (os.getpid(), LAUNCHER, alive), (LAUNCHER, SHELL, {})))


def test_a_process_descends_only_from_its_ancestors(tmp_path: Path) -> None:
    proc = tree(tmp_path, (os.getpid(), LAUNCHER, {}), (LAUNCHER, SHELL, {}))
    parent = ProcessId.of(LAUNCHER)
    assert parent is not None
    assert ranks.descends_from(parent, proc)
    assert not ranks.descends_from(ProcessId(parent.pid, 1), proc)
    assert not ranks.descends_from(ProcessId.this_process(), proc)
    assert not ranks.descends_from(ProcessId(2, 2), proc)


def test_a_process_is_not_taken_for_dead_where_no_more_files_can_be_opened() -> None:
    launcher = ProcessId.of(LAUNCHER)
    assert launcher is not None
    with subprocess.Popen(["true"]) as process:
        gone = ProcessId(process.pid, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        alive = launcher.alive(), gone.alive(), ranks.ENDED_PROCESS.alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert alive == (True, False, False), "a training that runs out of files keeps its lease"
