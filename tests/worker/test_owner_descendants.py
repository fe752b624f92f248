"""Which owner's a process is, remembered: on process tables that are made up, and through a restart of the worker."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId, Stat
from gpulease_protocol.model import LeaseState
from gpulease_worker.processes import owner_descendants
from gpulease_worker.processes.lease_cache import LeaseCache
from gpulease_worker.processes.owner_descendants import OwnerOf, resolve
from tests.worker.build import GPUS, kill, lease, python, until

LAUNCHER, RANK, LOADER = 100, 110, 111


def table(parents: Mapping[int, int], *, started: Mapping[int, int] | None = None) -> dict[int, Stat]:
    """Living processes, by pid, each with its parent; a process starts at its pid, unless `started` says otherwise."""
    return {
        pid: Stat("python", dead=False, parent=parent, group=pid, start_ticks=(started or {}).get(pid, pid))
        for pid, parent in parents.items()
    }


def process(pid: int) -> ProcessId:
    return ProcessId(pid, pid)


def found(known: OwnerOf) -> dict[int, int]:
    return {descendant.pid: owner.pid for descendant, owner in known.items()}


def after(*tables: dict[int, Stat], owners: tuple[int, ...] = (LAUNCHER,)) -> dict[int, int]:
    """What is known after walks of these process tables, one after the other."""
    known: OwnerOf = {}
    for processes in tables:
        known = resolve(processes, frozenset(map(process, owners)), known)
    return found(known)


WHOLE = table({1: 0, 50: 1, LAUNCHER: 50, RANK: LAUNCHER, LOADER: RANK, 200: 50})


def test_what_is_below_an_owner_is_known_and_nothing_else() -> None:
    assert after(WHOLE) == {RANK: LAUNCHER, LOADER: LAUNCHER}


def test_a_rank_whose_launcher_has_died_is_remembered_with_what_it_starts_then() -> None:
    orphaned = table({1: 0, 50: 1, RANK: 1, LOADER: RANK, 120: RANK})
    assert after(orphaned) == {}, "it was never seen below its launcher"
    assert after(WHOLE, orphaned) == {RANK: LAUNCHER, LOADER: LAUNCHER, 120: LAUNCHER}
    later = table({1: 0, 120: 1, 130: 120})
    assert after(WHOLE, orphaned, later) == {120: LAUNCHER, 130: LAUNCHER}, "however often an ancestor dies"
    assert after(WHOLE, orphaned, later, owners=()) == {}, "until no lease has that owner"


def test_a_pid_that_is_used_again_is_another_process() -> None:
    reused = table({1: 0, RANK: 1, 300: RANK}, started={RANK: 500, 300: 501})
    assert after(WHOLE, reused) == {}
    younger_parent = table({1: 0, LAUNCHER: 1, RANK: LAUNCHER}, started={RANK: 10})
    assert after(younger_parent) == {}, "no child is older than its parent: the table was read while both changed"


def test_a_process_that_takes_a_lease_itself_is_its_own_owner_and_its_children_are_its() -> None:
    assert after(WHOLE, WHOLE, owners=(LAUNCHER, RANK)) == {RANK: LAUNCHER, LOADER: RANK}
    known = resolve(WHOLE, frozenset({process(LAUNCHER)}), {})
    assert found(resolve(WHOLE, frozenset({process(LAUNCHER), process(RANK)}), known)) == {RANK: LAUNCHER, LOADER: RANK}


def test_an_orphan_that_an_owner_further_up_adopts_stays_its_own_owners() -> None:
    """As below `gpulease run`, which is a child subreaper."""
    owners = (50, LAUNCHER)
    assert after(WHOLE, owners=owners) == {LAUNCHER: 50, RANK: LAUNCHER, LOADER: LAUNCHER, 200: 50}
    adopted = table({1: 0, 50: 1, RANK: 50, LOADER: RANK, 200: 50})
    assert after(WHOLE, adopted, owners=owners) == {RANK: LAUNCHER, LOADER: LAUNCHER, 200: 50}


def test_of_too_many_those_known_before_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_descendants, "MAX_REMEMBERED", 1)
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"]) as owner:
        try:
            root = ProcessId.of(owner.pid)
            assert root is not None
            until(lambda: len(owner_descendants.process_tree.descendants(owner.pid)) == 2, "both are there")
            first, last = sorted(owner_descendants.process_tree.descendants(owner.pid), key=lambda one: one.pid)
            assert owner_descendants.trace({root}, {last: root}) == {last: root}
        finally:
            for child in (first, last):
                kill(child.pid)


def test_a_restarted_worker_still_knows_an_orphan(tmp_path: Path) -> None:
    """Parent and child, as launcher and rank; the parent is killed, then the worker is."""
    script = "import os, time; os.fork() or os.setsid(); time.sleep(600)"
    with subprocess.Popen(python("-c", script)) as launcher:
        told = replace(lease("mine", *GPUS), owner_pid=launcher.pid)
        cache = LeaseCache(tmp_path)
        cache.update([told])
        (rank,) = until(lambda: owner_descendants.process_tree.descendants(launcher.pid), "the rank is there")

        async def watch() -> None:
            watcher = owner_descendants.DescendantWatcher(cache)
            watcher.look()
            await watcher.close()

        try:
            asyncio.run(watch())
            owner = ProcessId.of(launcher.pid)
            assert owner is not None
            assert cache.owner_of() == {rank: owner}
            launcher.kill()
            launcher.wait()
            again = LeaseCache(tmp_path)
            again.load()
            (draining,) = again.update([replace(told, state=LeaseState.ENDED)])
            assert owner_descendants.trace(again.owners(), again.owner_of()) == {rank: owner}
            assert draining.descendants == (rank,)
            again.remember({})
            assert again.owner_of() == {}
        finally:
            kill(rank.pid)


def test_of_several_leases_of_one_owner_another_inherits_what_is_remembered(tmp_path: Path) -> None:
    cache, here = LeaseCache(tmp_path), ProcessId.this_process()
    told = [
        replace(lease(lease_id, *GPUS), owner_pid=here.pid, owner_start_ticks=here.start_ticks)
        for lease_id in ("one", "two")
    ]
    cache.update(told)
    cache.remember({process(5): here})
    assert [one.descendants for one in cache.update(told)] == [(process(5),), ()]
    assert [one.descendants for one in cache.update(told[1:])] == [(process(5),)]
    assert cache.update([]) == ()
    assert cache.owner_of() == {}
