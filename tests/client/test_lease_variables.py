"""A lease sets the variables of the contract in its holder's process, whatever else the daemon names."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess

import pytest

from gpulease import AsyncClient, Client, GPUExecutor
from gpulease_protocol.launchers import lease_variables
from tests.client import executor_tasks
from tests.client.fake_daemon import FakeDaemon
from tests.core.build import World
from tests.imported_program import completed

CODE = {
    "LD_PRELOAD": "/tmp/eve.so",
    "LD_LIBRARY_PATH": "/tmp",
    "PYTHONSTARTUP": "/tmp/eve.py",
    "PYTHONPATH": "/tmp",
    "BASH_ENV": "/tmp/eve.sh",
    "ENV": "/tmp/eve.sh",
    "PATH": "/tmp/eve",
    "CUDA_INJECTION64_PATH": "/tmp/eve.so",
    "CUDA_HOME": "/tmp/eve",
    "GPULEASE_URL": "http://eve.example:1",
    "GPULEASE_TOKEN": "hers",
    "GPULEASE_CONFIG": "/tmp/eve.toml",
    "GPULEASE_DAEMON_USER": "eve",
    "x; touch /tmp/eve; y": "1",
}
"""What would run a program of eve's, or lead to another daemon."""
KEPT = {"CUDA_VISIBLE_DEVICES": "GPU-0", "GPULEASE_LEASE_TOKEN": "7", "MASTER_PORT": "21007"}
BAD_VALUES = {"MASTER_ADDR": "127.0.0.1\ntouch /tmp/eve", "GPULEASE_JOB_ID": "a\0b", "CUDA_DEVICE_ORDER": "\x1b[2J"}


@pytest.fixture
def hostile(daemon: FakeDaemon) -> FakeDaemon:
    """A daemon that names them all."""
    daemon.more_env = {**CODE, **BAD_VALUES, "MASTER_PORT": "21007"}
    return daemon


def check(environ: dict[str, str]) -> None:
    """Fail unless only the variables of the contract come from the lease."""
    assert {name: environ.get(name) for name in KEPT} == KEPT
    named = CODE | BAD_VALUES
    assert {name: environ[name] for name in named if name in environ and environ[name] == named[name]} == {}


def test_a_lease_takes_over_its_own_variables_alone(hostile: FakeDaemon) -> None:
    with Client(hostile.url) as client, client.lease(1) as lease:
        check(lease.env)
        check(lease.environ())

    async def work() -> None:
        async with AsyncClient(hostile.url) as client, await client.lease(1) as lease:
            check(lease.env)
            check(lease.environ())

    asyncio.run(work())


def test_run_starts_its_command_without_what_else_the_daemon_names(hostile: FakeDaemon) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    ran = completed(["run", "-n", "1", "--", "env"], environment | {"GPULEASE_URL": hostile.url}, 60)
    assert ran.returncode == 0, ran.stderr
    shown = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    check(shown)
    assert shown["PATH"] == os.environ["PATH"]


def test_acquire_prints_the_variables_of_the_contract_alone(hostile: FakeDaemon) -> None:
    ran = completed(["acquire", "-n", "1"], os.environ | {"GPULEASE_URL": hostile.url}, 60)
    names = [shlex.split(line)[1].partition("=")[0] for line in ran.stdout.splitlines()]
    assert sorted(names) == sorted([*KEPT, "GPULEASE_LEASE_ID"])
    shell = ["bash", "-c", f"eval {shlex.quote(ran.stdout)}; env"]
    check(dict(line.partition("=")[::2] for line in subprocess.check_output(shell, text=True).splitlines()))


def test_a_task_of_an_executor_has_no_other_variables(hostile: FakeDaemon) -> None:
    with Client(hostile.url) as client, GPUExecutor(1, client=client) as executor:
        _, environ, _ = executor.submit(executor_tasks.environment).result(60)
    check(environ)


def test_a_process_has_every_variable_of_a_lease_that_is_granted() -> None:
    lease = World().node(gpus=1).lease()
    assert lease.env
    assert lease_variables(lease.env) == lease.env
