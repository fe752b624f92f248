"""A daemon whose database is another one, or a node with another name: what it has never heard of is not ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import RunState
from gpulease_worker import main
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.settings import WorkerSettings
from tests.worker.build import GPUS, kill, living, order, spec
from tests.worker.play import Worker, play, soon

JOB = order("j", spec("sh", "-c", "exec sleep 600"))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_it()


def end_it() -> None:
    for pid in living(JOB.lease_id):
        kill(pid)


def states(worker: Worker) -> list[RunState]:
    return [report.state for report in worker.jobs.reports()]


def test_a_job_of_another_database_goes_on_and_its_gpus_are_not_leased(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(worker: Worker) -> None:
        await worker.until([JOB], RunState.RUNNING, "first")
        assert worker.jobs.kept_gpus() == {}
        for _ in range(3):
            worker.jobs.reconcile([], "second")
            assert states(worker) == [RunState.RUNNING]
            assert set(worker.jobs.kept_gpus()) == set(GPUS)
        assert caplog.text.count("job j runs here, and was ordered from another database") == 1
        worker.jobs.close()
        again = Worker(tmp_path)
        again.jobs.reconcile([], "second")
        assert set(again.jobs.kept_gpus()) == set(GPUS), "the next worker does not know it"
        end_it()
        await soon(lambda: states(again) == [RunState.EXITED], "its end is seen")
        assert again.jobs.kept_gpus() == {}
        again.jobs.reconcile([], "second")
        assert again.jobs.reports() == (), "it has ended and is not forgotten"

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("ordered", "answering"),
    [
        (["first"], "first"),
        (["first", "second"], "second"),
        ([None], "first"),
        (["first"], None),
    ],
    ids=["its own", "a restored one that knew it", "it is from before an upgrade", "the daemon is older"],
)
@pytest.mark.parametrize("restarted", [False, True], ids=["", "another worker"])
def test_a_job_that_its_own_database_no_longer_orders_is_ended(
    tmp_path: Path, ordered: list[str | None], answering: str | None, restarted: bool
) -> None:
    async def story(worker: Worker) -> None:
        for database_id in ordered:
            await worker.until([JOB], RunState.RUNNING, database_id)
        if restarted:
            worker.jobs.close()
            worker = Worker(tmp_path)
        await soon(
            lambda: worker.jobs.reconcile([], answering) or not worker.jobs.reports(), "it is ended and forgotten"
        )
        assert not living(JOB.lease_id)

    play(tmp_path, story)


def test_a_worker_whose_node_has_another_name_now_ends_no_job_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def begin(worker: Worker) -> None:
        await worker.until([JOB], RunState.RUNNING, "first")

    async def found(worker: Worker) -> None:
        assert states(worker) == [RunState.RUNNING]

    async def forget(worker: Worker) -> None:
        await soon(lambda: worker.jobs.reconcile([], "first") or not worker.jobs.reports(), "it is forgotten")

    play(tmp_path, begin, settings=JobSettings(node="old"))
    assert main.run(WorkerSettings(url="http://127.0.0.1:1", node="new", data_dir=tmp_path, simulate="1")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gpulease worker: The data directory {tmp_path} cannot be used: job j of node old runs there, and under"
        " another name its worker would end it. Give it --node old, or wait until its jobs have ended."
    )
    play(tmp_path, found, settings=JobSettings(node="old"))
    end_it()
    play(tmp_path, forget, settings=JobSettings(node="old"))
    play(tmp_path, forget, settings=JobSettings(node="new"))
