"""`GPUExecutor` and `AsyncClient` on a real daemon with four simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gpulease import AsyncClient, Client, GPUExecutor, InUse, InvalidRequest, NeverFits, NotNow
from gpulease.executor.executor import ProcessDied, _abort_all
from tests.client import executor_tasks
from tests.daemon import DaemonProcess, daemon, events, eventually

pytestmark = pytest.mark.busy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon(tmp_path_factory.mktemp("executor")) as process:
        yield process


@pytest.fixture
def client(running: DaemonProcess) -> Iterator[Client]:
    with running.client() as connected:
        yield connected
        eventually(lambda: not connected.leases(["queued", "active"]), 60)


def all_free(client: Client) -> bool:
    return all(gpu.state == "free" for gpu in client.gpus())


def gone(pid: int) -> bool:
    """True when there is no such process, or only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def shared(held: list[tuple[list[str], float, float]]) -> list[Any]:
    """Pairs of holders that had a GPU in common at the same time."""
    return [
        (one, two)
        for one, two in combinations(held, 2)
        if set(one[0]) & set(two[0]) and one[1] < two[2] and two[1] < one[2]
    ]


def overlapping_grants(log: list[dict[str, Any]]) -> list[Any]:
    """Grants of a GPU that another lease still had, by the event log."""
    holder: dict[str, str] = {}
    found = []
    for event in log:
        if event["kind"] == "lease.granted":
            for uuid in event["gpus"]:
                if uuid in holder:
                    found.append((uuid, holder[uuid], event["lease_id"]))
                holder[uuid] = event["lease_id"]
        if event["kind"] == "lease.ended":
            holder = {uuid: lease for uuid, lease in holder.items() if lease != event["lease_id"]}
    return found


def test_twelve_tasks_on_four_gpus_never_share_one(client: Client, running: DaemonProcess, tmp_path: Path) -> None:
    with GPUExecutor(max_workers=8, client=client, label="sweep") as executor:
        held = list(executor.map(executor_tasks.hold, [str(tmp_path)] * 12, map(str, range(12))))
    assert len(held) == 12
    assert {len(gpus) for gpus, _, _ in held} == {1}
    assert len({gpus[0] for gpus, _, _ in held}) == 4
    assert shared(held) == []
    assert overlapping_grants(events(running)) == []
    assert not client.leases("active"), "the GPUs are given back before the results are there"


def test_twelve_tasks_of_one_event_loop_never_share_a_gpu(client: Client, running: DaemonProcess) -> None:
    async def work() -> list[tuple[list[str], float, float]]:
        async with AsyncClient(running.url) as waiting:

            async def hold() -> tuple[list[str], float, float]:
                loop = asyncio.get_running_loop()
                async with waiting.lease(count=2, wait_s=60) as lease:
                    begun = loop.time()
                    assert lease.environ()["MASTER_PORT"] == lease.env["MASTER_PORT"]
                    await asyncio.sleep(0.02)
                    return [gpu.uuid for gpu in lease.gpus], begun, loop.time()

            return await asyncio.gather(*(hold() for _ in range(12)))

    held = asyncio.run(work())
    assert {len(gpus) for gpus, _, _ in held} == {2}
    assert shared(held) == []
    assert overlapping_grants(events(running)) == []


def test_a_cancelled_asyncio_task_leaves_the_queue(client: Client, running: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(running.url) as waiting, waiting.lease(count=4, wait_s=60):
            asking = asyncio.ensure_future(waiting.lease(count=1, wait_s=60))
            while not await waiting.leases("queued"):
                assert not asking.done()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await waiting.leases("queued") == ()

    asyncio.run(work())


def test_the_process_has_its_lease_before_it_imports_the_callers_modules(client: Client, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("MASTER_PORT", "1")
    with GPUExecutor(gpus_per_task=2, client=client) as executor:
        at_import, environ, pid = executor.submit(executor_tasks.environment).result(60)
    assert environ["CUDA_VISIBLE_DEVICES"].count("GPU-") == 2
    assert at_import == environ["CUDA_VISIBLE_DEVICES"]
    assert int(environ["MASTER_PORT"]) > 1
    assert client.lease_by_id(environ["GPULEASE_LEASE_ID"]).end_reason == "released"
    assert pid != os.getpid()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_an_error_comes_back_with_its_traceback_and_fails_alone(client: Client) -> None:
    with GPUExecutor(client=client) as executor:
        failing, stubborn = executor.submit(executor_tasks.fail, "lr"), executor.submit(executor_tasks.fail_stubbornly)
        good = executor.submit(executor_tasks.add, 1, two=2)
        assert good.result(60) == 3
        error = failing.exception(60)
        assert isinstance(error, KeyError)
        assert "executor_tasks.py" in str(error.__cause__)
        assert "in fail\n" in str(error.__cause__)
        assert isinstance(stubborn.exception(60), RuntimeError)
        assert "Stubborn" in str(stubborn.exception(60).__cause__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("exit", ProcessDied, "exited with code 3"),
        ("kill", ProcessDied, "SIGKILL"),
        ("real-time", ProcessDied, f"was ended by signal {signal.SIGRTMIN + 1}"),
        ("sys.exit", SystemExit, "4"),
    ],
)
def test_a_process_that_dies_fails_only_its_own_future(client: Client, how: str, kind: Any, words: str) -> None:
    with GPUExecutor(client=client) as executor:
        dying, good = executor.submit(executor_tasks.die, how), executor.submit(executor_tasks.add, 1, 1)
        assert good.result(60) == 2
        error = dying.exception(60)
        assert isinstance(error, kind)
        assert words in str(error)
        assert executor.submit(executor_tasks.add, 2, 2).result(60) == 4
    eventually(lambda: all_free(client), 60)


def test_the_gpus_of_a_killed_process_are_released(client: Client, tmp_path: Path) -> None:
    with GPUExecutor(client=client) as executor:
        future = executor.submit(executor_tasks.wait_until_ended, str(tmp_path), "pids")
        eventually((tmp_path / "pids").exists, 60)
        pid, grandchild = map(int, (tmp_path / "pids").read_text().split())
        os.kill(pid, signal.SIGKILL)
        assert isinstance(future.exception(60), ProcessDied)
        eventually(lambda: gone(grandchild), 60, lambda: "what it has started goes with it")
    eventually(lambda: all_free(client), 60)


def test_a_call_that_cannot_be_pickled_fails_without_requesting_gpus(client: Client) -> None:
    asked = len(client.leases())
    with GPUExecutor(client=client) as executor:
        for refused in (executor.submit(lambda: 1), executor.submit(executor_tasks.add, threading.Lock(), 1)):  # type: ignore[arg-type]
            assert "cannot be sent to another process" in str(refused.exception(60))
        assert len(client.leases()) == asked
        assert "cannot be pickled" in str(executor.submit(executor_tasks.return_what_cannot_be_sent).exception(60))


def test_only_max_workers_wait_in_the_queue_and_a_cancelled_one_leaves_it(client: Client, tmp_path: Path) -> None:
    def queued() -> int:
        return len(client.leases("queued"))

    with client.lease(count=4, wait_s=60) as everything, GPUExecutor(2, client=client) as executor:
        futures = [executor.submit(executor_tasks.hold, str(tmp_path), name, 0.0) for name in "abcde"]
        eventually(lambda: queued() == 2, 60)
        assert futures[0].cancel()
        assert futures[4].cancel()
        wait([futures[0]], 20)
        eventually(lambda: sum(lease.end_reason == "cancelled" for lease in client.leases("ended")) >= 1, 60)
        eventually(lambda: queued() == 2, 60)
        everything.release()
        wait(futures, 60)
    assert [future.cancelled() for future in futures] == [True, False, False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "d"]


def test_a_wait_that_times_out_or_is_useless_fails_the_future(client: Client) -> None:
    with client.lease(count=4, wait_s=60), GPUExecutor(client=client, wait_s=0.1) as executor:
        assert isinstance(executor.submit(executor_tasks.add, 1, 1).exception(60), NotNow)
    with GPUExecutor(gpus_per_task=5, client=client) as executor:
        assert isinstance(executor.submit(executor_tasks.add, 1, 1).exception(60), NeverFits)


def test_a_task_never_waits_for_the_lease_that_its_program_runs_under(client: Client, monkeypatch) -> None:
    with client.lease(count=3, wait_s=60) as around:
        monkeypatch.setenv("GPULEASE_LEASE_ID", around.id)
        with pytest.raises(InUse, match=f"under lease {around.id}, which has 3 of the 4 GPUs"):
            GPUExecutor(gpus_per_task=2, client=client)
        with GPUExecutor(client=client) as executor:  # one is left
            assert executor.submit(executor_tasks.add, 1, 1).result(60) == 2
    with GPUExecutor(gpus_per_task=2, client=client) as executor:
        assert executor.submit(executor_tasks.add, 1, 1).result(60) == 2


def test_shutdown_with_cancel_futures_lets_running_tasks_finish(client: Client, tmp_path: Path) -> None:
    executor, continues = GPUExecutor(1, client=client), tmp_path / "continues"
    futures = [
        executor.submit(executor_tasks.begin_and_wait_for, str(tmp_path / name), str(continues)) for name in "ab"
    ]
    eventually((tmp_path / "a").exists, 60)
    executor.shutdown(wait=False, cancel_futures=True)
    assert not futures[0].done()
    continues.touch()
    executor.shutdown()
    assert futures[0].result(0) == "done"
    with pytest.raises(CancelledError):
        futures[1].result(0)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(executor_tasks.add, 1, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_ends_at_once_and_starts_no_task_of_its_parents(client: Client, tmp_path: Path) -> None:
    begun, continues = tmp_path / "begun", tmp_path / "continues"
    with GPUExecutor(client=client) as executor:
        future = executor.submit(executor_tasks.begin_and_wait_for, str(begun), str(continues))
        eventually(begun.exists, 60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(RuntimeError, match="make another one after the fork"):
                    executor.submit(executor_tasks.add, 1, 1)
                executor.shutdown()
                _abort_all()  # as at the end of a process
                code = 0
            finally:
                os._exit(code)
        ended: list[int] = []
        eventually(lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or any(ended), 60)
        assert not future.done(), "the child has not waited for the tasks of its parent, and not ended them"
        assert ended[-1] == 0
        continues.touch()
        assert future.result(60) == "done"


def test_a_lost_lease_ends_the_process(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.executor.executor.TTL_S", 9.0)
    with GPUExecutor(client=client) as executor:
        future = executor.submit(executor_tasks.wait_until_ended, str(tmp_path), "pids")
        eventually((tmp_path / "pids").exists, 60)
        (lease,) = client.leases("active")
        client.release(lease.id, lease.fencing_token)
        assert "was lost" in str(future.exception(60))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    eventually(lambda: all(map(gone, pids)), 60)


PROGRAM = """
import os, signal, sys
import gpulease.executor.executor
from tests.client import executor_tasks
gpulease.executor.executor.TTL_S = 9.0
if __name__ == "__main__":
    {body}
"""
BLOCK = """
    with gpulease.GPUExecutor() as executor:
        executor.submit(executor_tasks.wait_until_ended, {directory!r}, "pids")
        {then}"""


@pytest.mark.parametrize(
    ("then", "sent", "code"),
    [
        ("signal.pause()", signal.SIGINT, -signal.SIGINT),
        ("pass", signal.SIGINT, -signal.SIGINT),
        ("signal.pause()", signal.SIGKILL, -signal.SIGKILL),
        ("pass", None, 0),
    ],
    ids=["ctrl-c in the block", "ctrl-c at its end", "killed", "without shutdown"],
)
def test_a_program_that_exits_ends_its_tasks(
    client: Client, running: DaemonProcess, tmp_path: Path, then: str, sent: int | None, code: int
) -> None:
    program = tmp_path / "program.py"
    block = BLOCK.format(directory=str(tmp_path), then=wait_then(tmp_path, then))
    if sent is None:
        block = block.replace(
            "with gpulease.GPUExecutor() as executor", "executor = gpulease.GPUExecutor()\n    if True"
        )
    program.write_text(PROGRAM.format(body=block))
    environ = os.environ | {"GPULEASE_URL": running.url, "PYTHONPATH": path()}
    said = tmp_path / "said"
    with said.open("wb") as output, subprocess.Popen([sys.executable, program], env=environ, stderr=output) as started:
        eventually(lambda: (tmp_path / "ready").exists() or started.poll() is not None, 60, said.read_text)
        if sent is not None:
            started.send_signal(sent)
        assert started.wait(60) == code, said.read_text()
    pid, grandchild = map(int, (tmp_path / "pids").read_text().split())
    eventually(lambda: gone(pid), 60)
    if sent == signal.SIGKILL:
        os.kill(grandchild, signal.SIGKILL)  # only the daemon's worker is left to end it
    eventually(lambda: gone(grandchild), 60)
    eventually(lambda: not client.leases("active") and all_free(client), 90)


def wait_then(directory: Path, then: str) -> str:
    ready = f"open({str(directory / 'ready')!r}, 'w').close()"
    return f"""import time, pathlib
        while not (pathlib.Path({str(directory)!r}) / "pids").exists(): time.sleep(0.01)
        {ready}
        {then}"""


def test_a_main_module_that_submits_on_import_gets_an_error(running: DaemonProcess, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import gpulease\nwith gpulease.GPUExecutor() as e:\n    print(e.submit(max, 1, 2).result())\n")
    environ = os.environ | {"GPULEASE_URL": running.url, "PYTHONPATH": path()}
    done = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "__main__" in done.stderr


BY_VALUE = """
import gpulease
class Loss(float): pass
class TooLarge(Exception): pass
def train(rate):
    if rate > 1:
        raise TooLarge(rate)
    return Loss(rate)
with gpulease.GPUExecutor(by_value=True) as executor:
    print([type(loss) is Loss for loss in executor.map(train, [0.1, 0.2])], executor.submit(lambda: 3).result())
    print(type(executor.submit(train, 2).exception()) is TooLarge)
"""


def test_what_a_main_module_defines_is_sent_by_value(running: DaemonProcess, tmp_path: Path) -> None:
    """As in a notebook, and without `if __name__ == "__main__"`."""
    environ = os.environ | {"GPULEASE_URL": running.url, "PYTHONPATH": path()}
    program = tmp_path / "program.py"
    program.write_text(BY_VALUE)
    done = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[True, True] 3\nTrue\n", done.stderr


def test_by_value_without_cloudpickle_says_what_to_install(client: Client, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        GPUExecutor(client=client, by_value=True)


def test_progress_is_shown_on_stderr(running: DaemonProcess, tmp_path: Path) -> None:
    body = """
    with gpulease.GPUExecutor(progress=True, label="sweep") as executor:
        print(sum(executor.map(executor_tasks.add, range(3), range(3))))"""
    environ = os.environ | {"GPULEASE_URL": running.url, "PYTHONPATH": path()}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body=body))
    done = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "6\n"
    assert "sweep" in done.stderr
    assert "3/3" in done.stderr


def test_progress_without_rich_says_what_to_install(client: Client, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match="pip install rich"):
        GPUExecutor(client=client, progress=True)


@pytest.mark.parametrize(
    "wrong",
    [{"max_workers": 0}, {"gpus_per_task": 0}, {"gpus_per_task": "2"}, {"gpus_per_task": True}, {"mp_context": "fork"}],
)
def test_invalid_arguments_are_refused(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        GPUExecutor(client=client, **wrong)


def path() -> str:
    return os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in ("protocol", "client", "worker", "server"))])
