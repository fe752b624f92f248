"""`leases.json` survives a full disk, a kill at any moment, and damage of any kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import LeaseState
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.processes import lease_cache
from gpulease_worker.processes.lease_cache import FILE, LeaseCache
from tests.worker.build import GPUS, lease

HERE = ProcessId.this_process()
OWNED = replace(lease("mine", *GPUS), owner_pid=HERE.pid)
"""A lease of which the daemon does not know the start time of its owner."""


def written(data_dir: Path) -> dict[str, Any]:
    """The content of a file that a worker has written for that lease."""
    cache = LeaseCache(data_dir)
    cache.update((), 1000)
    cache.update((OWNED,), 2000)
    document: dict[str, Any] = json.loads((data_dir / FILE).read_text())
    return document


def next_worker(data_dir: Path, *leases: NodeLease) -> lease_cache.CachedLease:
    """The first of these leases as the next worker has it, which was never told of one that it does not find."""
    cache = LeaseCache(data_dir)
    cache.load()
    return cache.update(leases)[0]


def ended(of: NodeLease) -> NodeLease:
    return replace(of, state=LeaseState.ENDED)


def test_a_file_that_could_not_be_written_is_written_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease_cache, "SAVE_AGAIN_S", 0.0)
    real = Path.write_text

    def full(path: Path, content: str, **what: Any) -> int:
        real(path, content[:10], **what)
        raise OSError(28, "No space left on device")

    cache = LeaseCache(tmp_path)
    told = (OWNED,)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for _ in range(3):
            cache.update(told)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
    assert list(tmp_path.iterdir()) == [], "and no part of it is left"
    cache.update(told)  # the same leases: nothing has changed since
    assert next_worker(tmp_path, ended(OWNED)).owner == HERE


def test_a_failing_disk_is_not_written_to_with_each_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def broken(path: Path, content: str, **what: Any) -> int:
        attempts.append(path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "write_text", broken)
    monkeypatch.setattr(lease_cache, "SAVE_AGAIN_S", 600.0)
    cache = LeaseCache(tmp_path)
    for _ in range(3):
        cache.update((OWNED,))
    assert len(attempts) == 1, "when something has changed, or after a pause"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text + "}",
        lambda text: "\0" * len(text),
        lambda text: "null",
        lambda text: "[]",
        lambda text: '{"leases": null}',
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"boot_id": "of another node"}),
        lambda text: json.dumps(json.loads(text) | {"boot_id": ""}),
    ],
)
def test_a_file_that_says_nothing_keeps_no_worker_from_starting(tmp_path: Path, damage: Callable[[str], str]) -> None:
    written(tmp_path)
    (tmp_path / FILE).write_text(damage((tmp_path / FILE).read_text()))
    known = next_worker(tmp_path, ended(OWNED))
    assert (known.owner, known.since_ticks) == (None, None), "the pid may be another's, and the lease may be old"
    assert json.loads((tmp_path / FILE).read_text())["leases"][0]["id"] == "mine", "and it is written again"


def test_random_damage_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    written(tmp_path)
    content, chance = (tmp_path / FILE).read_bytes(), random.Random(7)
    for _ in range(400):
        at, size = chance.randrange(len(content)), chance.randrange(1, 9)
        other = chance.choice([b"", b"null", b"[]", b"{}", b"-1", b'"', chance.randbytes(size)])
        (tmp_path / FILE).write_bytes(content[:at] + other + content[at + size :])
        assert next_worker(tmp_path, OWNED).id == "mine"


def test_the_file_of_a_newer_worker_is_read_as_far_as_this_one_understands_it(tmp_path: Path) -> None:
    content = written(tmp_path)
    content["leases"][0] |= {"state": "suspended", "shares": [1, {"of": 2}], "uid": 4001}
    (tmp_path / FILE).write_text(json.dumps(content | {"format": 9}))
    known = next_worker(tmp_path, ended(OWNED))
    assert (known.owner, known.since_ticks, known.state) == (HERE, 1000, LeaseState.ENDED)


def test_the_file_of_an_older_worker_knows_no_moment_for_leases_that_are_not_in_it(tmp_path: Path) -> None:
    content = written(tmp_path)
    del content["as_of_ticks"]
    (tmp_path / FILE).write_text(json.dumps(content))
    assert next_worker(tmp_path, lease("next", *GPUS)).since_ticks is None


def test_a_lease_that_its_worker_could_not_write_any_more_is_as_old_as_the_file(tmp_path: Path) -> None:
    """The worker was killed between the answer that named the lease and the file: its processes may be older than the
    next worker, and must not be taken for older than the lease."""
    written(tmp_path)
    assert next_worker(tmp_path, lease("next", *GPUS)).since_ticks == 1000


def test_what_a_killed_worker_was_writing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}").write_text("{")
    written(tmp_path)
    assert not (tmp_path / f".{FILE}").exists()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
