"""The parts of one job on several nodes: real supervisors of several workers on this host, and no daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.model import JobSpec, Launcher
from gpulease_protocol.node_protocol import GangPlace, JobOrder, JobReport, RunState
from gpulease_worker.jobs import job_records, launch_plan
from gpulease_worker.jobs.fence import ContactFile, since_boot_s
from gpulease_worker.jobs.gang_link import PeerEnd
from gpulease_worker.jobs.gang_part import PEER_END_S, GangPart
from tests.ports import free_port
from tests.worker.build import kill, living, number_in, order, spec
from tests.worker.play import DEADLINE_S, Worker, play

NODES = ("a", "b", "c")
STAYS = 'trap "" TERM; test $NODE_RANK = 0 && n=a || n=b; echo 1 > {}/$n-waits; while :; do sleep 0.1; done'
FAILS_AT_B = "test $NODE_RANK = 1 && exit 7; exec sleep 600"


class Nodes:
    """The workers of some nodes, which follow the orders of one job."""

    def __init__(self, tmp_path: Path, job: JobSpec, first: Worker, nodes: Sequence[str] = NODES[:2]) -> None:
        self.port, lease = free_port(), f"lease-gang-{os.urandom(4).hex()}"
        self.lease_id = lease
        addresses = ("127.0.0.1",) * len(nodes)
        self.orders = [
            order(
                "j",
                job,
                lease=lease,
                port=self.port,
                gang=GangPlace(rank=rank, nodes=tuple(nodes), addresses=addresses),
                go=False,
            )
            for rank in range(len(nodes))
        ]
        self.workers = [first, *(Worker(tmp_path / node) for node in nodes[1:])]

    async def until(
        self, condition: Callable[[list[JobReport]], object], *, only: Sequence[int] | None = None
    ) -> list[JobReport]:
        """Follow the orders, on these nodes alone, until the reports meet a condition."""
        ranks = range(len(self.workers)) if only is None else only
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for rank in ranks:
                    self.workers[rank].jobs.reconcile([self.orders[rank]])
                reports = [report for worker in self.workers for report in worker.jobs.reports()]
                if condition(reports):
                    return reports
                await asyncio.sleep(0.02)

    async def go(self) -> None:
        """Prepare all, and let them go."""
        await self.until(all_are(RunState.PREPARED, len(self.orders)))
        self.orders = [replace(one, go=True) for one in self.orders]

    async def end(self) -> list[JobReport]:
        await self.go()
        return await self.until(all_are(RunState.EXITED, len(self.orders)))

    def directory(self, rank: int, tmp_path: Path) -> Path:
        return tmp_path / NODES[rank] / "jobs" / "j"


def all_are(state: RunState, number: int) -> Callable[[list[JobReport]], bool]:
    return lambda reports: len(reports) == number and all(report.state is state for report in reports)


def story(
    tmp_path: Path, job: JobSpec, tell: Callable[[Nodes], Awaitable[None]], nodes: Sequence[str] = NODES[:2]
) -> None:
    """Play a story on the nodes `a`, `b`, ..."""

    async def act(worker: Worker) -> None:
        told = Nodes(tmp_path, job, worker, nodes)
        await tell(told)

    play(tmp_path / "a", act)


def test_no_part_starts_before_all_are_prepared(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    async def tell(nodes: Nodes) -> None:
        await nodes.until(lambda reports: [one.state for one in reports] == [RunState.PREPARED], only=[0])
        await nodes.until(all_are(RunState.PREPARED, 2))
        assert not begun.exists()
        assert [report.exit_code for report in await nodes.end()] == [0, 0]
        lines = sorted(begun.read_text().splitlines())
        assert lines == [f"{rank} 127.0.0.1:{nodes.port} lo =lo" for rank in range(2)]
        for rank in range(2):
            assert (nodes.directory(rank, tmp_path) / "logs" / f"rank-{2 * rank}.log").exists(), "ranks are global"

    words = "$NODE_RANK $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"
    story(tmp_path, spec("sh", "-c", f"echo {words} >> {begun}"), tell)


@pytest.mark.slow
def test_torchrun_trains_over_two_nodes_with_global_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "kept = torch.ones(1)\n"
        "dist.all_reduce(kept)\n"
        "print(dist.get_rank(), kept.item(), flush=True)\n"
        "dist.barrier()\n"
        "os._exit(0)\n"
    )

    async def tell(nodes: Nodes) -> None:
        reports = await nodes.end()
        assert [report.exit_code for report in reports] == [0, 0], reports
        for rank in range(4):
            log = nodes.directory(rank // 2, tmp_path) / "logs" / f"rank-{rank}.log"
            assert log.read_text().split() == [str(rank), "4.0"]

    story(tmp_path, spec(str(script), launcher=Launcher.TORCHRUN), tell)


def test_what_the_first_part_that_fails_says_is_known_from_what_only_follows(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        first, second = await nodes.end()
        assert (second.exit_code, second.follows) == (7, False)
        assert (first.follows, first.reason) == (True, "Its part on node b had ended.")
        assert not living(nodes.lease_id)

    story(tmp_path, spec("sh", "-c", FAILS_AT_B), tell)


def test_the_parts_that_are_not_the_first_learn_of_an_end_through_it(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        reports = await nodes.end()
        assert [report.follows for report in reports] == [True, False, True]

    story(tmp_path, spec("sh", "-c", FAILS_AT_B), tell, NODES)


def test_a_part_that_has_ended_well_ends_no_other(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.go()
        await nodes.until(lambda reports: [one.state for one in reports] == [RunState.RUNNING, RunState.EXITED])
        (tmp_path / "on").touch()
        assert [report.exit_code for report in await nodes.until(all_are(RunState.EXITED, 2))] == [0, 0]

    wait = f"until test -e {tmp_path}/on; do sleep 0.05; done"
    story(tmp_path, spec("sh", "-c", f"test $NODE_RANK = 1 || {wait}"), tell)


def test_a_killed_supervisor_ends_the_other_part_without_any_daemon(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.go()
        await nodes.until(all_are(RunState.RUNNING, 2))
        start = job_records.read(nodes.directory(1, tmp_path), job_records.START, job_records.StartRecord)
        assert start is not None
        kill(start.supervisor.pid)
        first, second = await nodes.until(all_are(RunState.EXITED, 2))
        assert second.reason == "The job's supervisor died; its processes were killed."
        assert (first.follows, second.follows) == (True, False)
        assert not living(nodes.lease_id)

    story(tmp_path, spec("sleep", "600"), tell)


def test_the_end_of_a_part_leaves_the_processes_of_the_other_alone(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.go()
        await nodes.until(lambda _: number_in(tmp_path / "pid"))
        await nodes.until(lambda reports: reports[1].state is RunState.EXITED)
        assert number_in(tmp_path / "pid") in living(nodes.lease_id)
        nodes.orders[0] = replace(nodes.orders[0], stop=True, grace_s=1)
        await nodes.until(all_are(RunState.EXITED, 2))

    first = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    story(tmp_path, spec("sh", "-c", f"test $NODE_RANK = 1 || {{ {first}; }}"), tell)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        with socket.create_server(("127.0.0.1", nodes.port)):
            (report,) = await nodes.until(all_are(RunState.EXITED, 1), only=[0])
        assert report.reason == (
            f"Port {nodes.port} of node a cannot be used for the rendezvous: Address already in use."
        )

    story(tmp_path, spec("true"), tell)


def test_a_leader_that_cannot_be_reached_is_named_while_its_part_waits(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        (report,) = await nodes.until(lambda reports: reports and reports[0].reason, only=[1])
        assert report.state is RunState.STARTING
        assert report.reason == f"Node b cannot reach node a at 127.0.0.1:{nodes.port}: connection refused."
        nodes.orders[1] = replace(nodes.orders[1], stop=True, grace_s=1)
        (report,) = await nodes.until(all_are(RunState.EXITED, 1), only=[1])
        assert report.reason == "It was stopped before it started."

    story(tmp_path, spec("true"), tell)


def test_a_working_directory_that_is_missing_on_one_node_ends_the_others_before_anything_starts(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        spec = replace(nodes.orders[0].spec, working_directory=str(tmp_path))
        nodes.orders[0] = replace(nodes.orders[0], spec=spec)
        (report,) = await nodes.until(all_are(RunState.EXITED, 1), only=[1])
        assert report.reason == f"The working directory {tmp_path}/none does not exist on this node."
        await nodes.until(lambda reports: RunState.PREPARED in [one.state for one in reports])
        nodes.orders[0] = replace(nodes.orders[0], stop=True, grace_s=5)
        await nodes.until(all_are(RunState.EXITED, 2))

    story(tmp_path, spec("true", working_directory=f"{tmp_path}/none"), tell)


def test_a_new_worker_finds_a_prepared_part_and_lets_it_go(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.until(all_are(RunState.PREPARED, 2))
        nodes.workers[1].jobs.close()
        nodes.workers[1] = Worker(tmp_path / "b")
        assert [report.exit_code for report in await nodes.end()] == [0, 0]

    story(tmp_path, spec("true"), tell)


def test_strangers_at_the_leased_port_change_nothing(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.until(all_are(RunState.PREPARED, 2))
        for words in ("hello\n", "gpulease another-lease 1\n", "gpulease LEASE 2\n", "gpulease LEASE x\n", "x" * 300):
            with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
                stranger.sendall(words.replace("LEASE", nodes.lease_id).encode())
                assert await asyncio.to_thread(stranger.recv, 100) == b"", words
        assert [report.exit_code for report in await nodes.end()] == [0, 0]

    story(tmp_path, spec("true"), tell)


def test_a_part_that_is_stopped_is_missed_although_it_ends_with_0(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        await nodes.go()
        await nodes.until(all_are(RunState.RUNNING, 2))
        await nodes.until(lambda _: (tmp_path / "waits").exists())
        nodes.orders[1] = replace(nodes.orders[1], stop=True, grace_s=5)
        first, second = await nodes.until(all_are(RunState.EXITED, 2))
        assert (second.exit_code, second.reason, second.follows) == (0, "It was stopped on request.", True)
        assert (first.reason, first.follows) == ("Its part on node b had ended.", True)

    saves = f"trap 'exit 0' TERM; touch {tmp_path}/waits; while :; do sleep 0.05; done"
    story(tmp_path, spec("sh", "-c", f"test $NODE_RANK = 0 && exec sleep 600; {saves}"), tell)


def test_a_part_ends_at_its_fence_while_it_waits_for_the_others(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        ContactFile(tmp_path / "a").note(since_boot_s())
        (report,) = await nodes.until(all_are(RunState.EXITED, 1), only=[0])
        said = "No daemon has answered this node for 2 s, which is the job's fence (fence_s)."
        assert (report.exit_code, report.reason, report.follows) == (None, said, False)

    story(tmp_path, spec("true", fence_s=2.0), tell)


def test_the_fence_of_one_node_ends_the_job_on_all(tmp_path: Path) -> None:
    async def tell(nodes: Nodes) -> None:
        def is_heard(reports: list[JobReport]) -> bool:
            ContactFile(tmp_path / "b").note(since_boot_s())
            return all_are(RunState.PREPARED, 2)(reports)

        fenced = replace(nodes.orders[1].spec, fence_s=10.0)
        nodes.orders[1] = replace(nodes.orders[1], spec=fenced)
        await nodes.until(is_heard)
        first, second = await nodes.end()
        said = "No daemon has answered this node for 10 s, which is the job's fence (fence_s)."
        assert (second.reason, second.follows) == (said, False)
        assert (first.reason, first.follows) == ("Its part on node b had ended.", True)
        assert not living(nodes.lease_id)

    story(tmp_path, spec("sleep", "600"), tell)


def test_an_order_without_other_nodes_is_as_before() -> None:
    assert JobOrder(job_id="j", lease_id="l", gpus=(), spec=spec("true"), env={}).go is True


class LinkThatEnded:
    """The connections of a part, after another has ended."""

    def __init__(self, *, is_lost: bool) -> None:
        self.end = PeerEnd("Its part on node b had ended.", is_lost)

    def advance(self) -> PeerEnd:
        return self.end


@pytest.mark.parametrize(
    ("is_lost", "ordered", "at_s"),
    [(False, False, 10.0 + PEER_END_S), (False, True, None), (True, False, 10.0), (True, True, 10.0)],
)
def test_a_part_that_was_told_to_stop_has_its_grace_period_though_another_is_done(
    tmp_path: Path, is_lost: bool, ordered: bool, at_s: float | None
) -> None:
    place = GangPlace(rank=0, nodes=("a", "b"), addresses=("127.0.0.1", "127.0.0.1"))
    plan = launch_plan.plan_launch(
        order("j", spec("true"), gang=place), own={}, url="", python="python", work=tmp_path, logs=tmp_path
    )
    part = GangPart(plan, place, tmp_path)
    part._link = LinkThatEnded(is_lost=is_lost)  # type: ignore[assignment]
    assert part.stop_at_s(10.0, ordered=ordered) == at_s


@pytest.mark.parametrize("stopped_by", ["signal", "leaving"])
def test_a_part_that_only_its_own_node_stops_ends_soon_after_another(tmp_path: Path, stopped_by: str) -> None:
    """Not after its grace period, which the daemon does not know of: the next attempt would begin before that."""

    async def tell(nodes: Nodes) -> None:
        await nodes.go()
        await nodes.until(lambda _: number_in(tmp_path / "a-waits") and number_in(tmp_path / "b-waits"))
        directory = nodes.directory(0, tmp_path)
        start = job_records.read(directory, job_records.START, job_records.StartRecord)
        assert start is not None
        if stopped_by == "leaving":
            job_records.write(directory, job_records.STOP, job_records.StopRecord(grace_s=600.0, node_left=True))
        began_s = time.monotonic()
        os.kill(start.supervisor.pid, signal.SIGTERM)
        nodes.orders[1] = replace(nodes.orders[1], stop=True, grace_s=0.1)
        await nodes.until(all_are(RunState.EXITED, 2))
        assert time.monotonic() - began_s < 30.0

    story(tmp_path, spec("sh", "-c", STAYS.format(tmp_path)), tell)


def test_an_attempt_waits_until_nothing_of_the_last_one_is_left_on_its_node(tmp_path: Path) -> None:
    job = spec("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    first = order("j", job)
    second = replace(first, attempt=2, spec=spec("sleep", "600"))

    async def story(worker: Worker) -> None:
        await worker.until([first], RunState.RUNNING)
        seen: list[tuple[bool, RunState]] = []
        async with asyncio.timeout(DEADLINE_S):
            while not seen or seen[-1] != (False, RunState.RUNNING):
                worker.jobs.reconcile([second])
                states = {report.attempt: report.state for report in worker.jobs.reports()}
                seen.append((states.get(1, RunState.EXITED) is not RunState.EXITED, states[2]))
                await asyncio.sleep(0.02)
        assert (True, RunState.STARTING) in seen
        assert (True, RunState.RUNNING) not in seen, "both attempts ran"
        await worker.until([replace(second, stop=True, grace_s=0.0)], RunState.EXITED)

    play(tmp_path, story)
