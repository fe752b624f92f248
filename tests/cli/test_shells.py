"""GPUs for a shell: `acquire` and `release` in real shells, `gpulease shell`, and `run` inside a lease."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import Client, Lease, LeaseState
from gpulease_cli.commands.run import FAILED, NOT_EXECUTABLE, NOT_FOUND
from tests.cli.programs import Program, environ, wait_until

PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

BOUND = """
eval "$(true; gpulease acquire -n 2 --wait 1m | cat)" || exit 9
echo "$$ $GPULEASE_LEASE_ID"
eval "$(gpulease acquire -n 1)" && exit 8
gpulease run -n 1 -- sh -c 'echo "$CUDA_VISIBLE_DEVICES"'
gpulease run -n 3 -- true && exit 7
eval "$(gpulease release)"
env | grep -E '^(GPULEASE_(LEASE|TOKEN)|CUDA_|MASTER_)'
eval "$(gpulease acquire -n 1 --wait 1m)"
eval "$(gpulease acquire -n 1 --wait 1m --new)"
"""


def active(client: Client) -> tuple[Lease, ...]:
    return client.leases(LeaseState.ACTIVE)


@pytest.mark.budget(25)
@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_lease_belongs_to_the_shell_that_evaluates_it(client: Client, url: str, shell: str) -> None:
    result = subprocess.run(
        [shell, "-c", BOUND],
        env=environ(GPULEASE_URL=url, PATH=PROGRAMS),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    owner, mask = result.stdout.splitlines()
    pid, lease_id = owner.split()
    lease = client.lease_by_id(lease_id)
    assert lease.holder.owner_pid == int(pid), "and not the fork that ran the substitution"
    assert lease.end_reason == "released"
    assert mask == lease.gpus[0].uuid, "an inner run takes no GPU of its own"
    said = result.stderr
    assert f"({lease_id}), until {shell} (pid {pid}) ends; " in said
    assert f"This shell has {lease_id} already: GPUs 0, 1 of " in said
    assert 'Give it back first: eval "$(gpulease release)". Or keep both: gpulease acquire --new.' in said
    assert f"-n/--gpus: {lease_id}, the lease of this shell, has 2 GPUs, not 3." in said
    wait_until(lambda: not active(client))
    ended = [one.end_reason for one in client.leases(LeaseState.ENDED) if one.holder.owner_pid == int(pid)]
    assert sorted(ended) == ["holder_died", "holder_died", "released"]


def test_a_lease_ends_when_the_terminal_of_its_shell_is_closed(client: Client, url: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "-i"], environ(GPULEASE_URL=url, PATH=PROGRAMS, TERM="dumb"))
    try:
        os.write(terminal, b'eval "$(gpulease acquire -n 1 --wait 1m)"\n')
        wait_until(lambda: active(client))
        assert active(client)[0].holder.owner_pid == pid
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    wait_until(lambda: not active(client))


@pytest.mark.budget(20)
def test_suspend_in_a_leased_shell_hands_the_terminal_back_and_fg_continues_it(client: Client, url: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        outer = environ(GPULEASE_URL=url, PATH=PROGRAMS, TERM="dumb", SHELL="/bin/bash", PS1="")
        os.execvpe("bash", ["bash", "--norc", "-i"], outer)
    drawn = b""

    def shows(text: bytes) -> None:
        nonlocal drawn
        while text not in drawn:
            assert select.select([terminal], [], [], 30)[0], drawn
            drawn += os.read(terminal, 4096)

    try:
        os.write(terminal, b"gpulease shell -n 1 --wait 1m\n")
        wait_until(lambda: active(client))
        os.write(terminal, b"echo inner $((20+1)) $$\n")
        shows(b"inner 21")
        for number in (31, 41):  # twice, because the second one has to be as the first
            os.write(terminal, b"suspend\n")
            shows(b"Stopped")
            drawn = b""
            os.write(terminal, f"echo outer $(({number}+1)) $((9999999+$$-{pid}))\n".encode())
            shows(f"outer {number + 1} 9999999".encode())
            os.write(terminal, b"fg\n")
            shows(b"gpulease shell -n 1")
            os.write(terminal, f"echo inner $(({number}+2))\n".encode())
            shows(f"inner {number + 2}".encode())
            drawn = b""
        assert active(client), "the lease lasts as long as the shell"
        os.write(terminal, b"exit\n")
        wait_until(lambda: not active(client))
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def test_a_renewed_lease_that_a_process_holds_is_said_to_end_with_it(client: Client, gpulease: Program) -> None:
    with client.lease(count=1, wait_s=60) as lease:
        said = gpulease("renew", lease.id, GPULEASE_LEASE_ID=lease.id)
        assert said.stdout == f"{lease.id} lasts until pid {os.getpid()} ends\n", said.stderr


def test_a_detached_lease_belongs_to_no_process(client: Client, gpulease: Program) -> None:
    acquired = gpulease("acquire", "--detach", "--ttl", "1h", "--wait", "1m")
    assert "for 1h 00m unless renewed; " in acquired.stderr
    (lease,) = active(client)
    assert (lease.liveness, lease.ttl_s) == ("heartbeat", 3600)
    assert gpulease("renew", lease.id[:12]).stdout == f"{lease.id} lasts 1h 00m from now\n"
    bound = {"GPULEASE_LEASE_ID": lease.id}
    assert gpulease("renew", **bound).stdout == f"{lease.id} lasts 1h 00m from now\n"
    brief = gpulease("acquire", "--detach", "--time", "10m", "--wait", "1m")
    assert "), for 10m 00s; " in brief.stderr, "its ttl of 2h makes it no longer"
    longer = gpulease("acquire", "--detach", "--time", "10m", "--ttl", "5m", "--wait", "1m")
    assert "), for 5m 00s unless renewed, for 10m 00s at most; " in longer.stderr
    other = gpulease("acquire", "--detach", "--json", "--wait", "1m")
    assert (other.returncode, other.stderr) == (0, ""), "programs that read it are told nothing else"
    released = gpulease("release", "lease-0000000000000000", *(one.id for one in active(client)))
    assert (released.returncode, released.stdout.count(" is released")) == (1, 4)
    again = gpulease("release", **bound)
    assert (again.returncode, again.stdout.split()[0]) == (0, "unset"), "a lease that has ended leaves a shell to clean"
    ended = gpulease("run", "--", "true", **bound)
    assert ended.returncode == 4
    assert f"{lease.id}, the lease of this shell, has ended: released." in ended.stderr
    assert gpulease("run", "--new", "--wait", "1m", "--", "true", **bound).returncode == 0
    assert gpulease("release").returncode == 2
    assert "This shell has no lease." in gpulease("release").stderr


def test_a_shell_on_leased_gpus_says_which_it_has(client: Client, url: str) -> None:
    words = [sys.executable, "-m", "gpulease_cli", "shell", "-n", "2", "--wait", "1m"]
    result = subprocess.run(
        words,
        input='echo "$GPULEASE: $CUDA_VISIBLE_DEVICES"\nexit 3\n',
        env=environ(GPULEASE_URL=url, SHELL="/bin/sh"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 3
    names, mask = result.stdout.strip().split(": ")
    assert (names.startswith("GPUs "), mask.count("GPU-")) == (True, 2)
    assert result.stderr.startswith(f"gpulease: {names} of ")
    assert result.stderr.strip().endswith("until this shell ends")
    assert not active(client)


def test_a_command_is_ended_when_the_lease_around_it_ends(client: Client, url: str, tmp_path: Path) -> None:
    with client.lease(1, wait_s=60) as lease:
        script = f"touch {tmp_path / 'runs'}; exec sleep 600"
        inner = subprocess.Popen(
            [sys.executable, "-m", "gpulease_cli", "run", "--", "sh", "-c", script],
            env=environ(GPULEASE_URL=url) | lease.env,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until((tmp_path / "runs").exists)
            client.release(lease.id, lease.fencing_token)
            assert inner.wait(60) == 4
            assert f"{lease.id} ended before the command did" in inner.communicate()[1]
        finally:
            inner.kill()
            inner.wait()


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("./train.py", NOT_EXECUTABLE, "do:  chmod +x ./train.py, or python ./train.py; no GPU was leased"),
        ("./", NOT_EXECUTABLE, "why: ./ is a directory"),
        ("train.py", NOT_FOUND, "do:  ./train.py, or python train.py; no GPU was leased"),
        ("echo hi there", NOT_FOUND, "do:  leave out the quotes, or write sh -c '...'; no GPU was leased"),
    ],
)
def test_a_command_that_cannot_run_leases_nothing(
    client: Client, gpulease: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, code: int, said: str
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    result = gpulease("run", "--", word)
    assert result.returncode == code
    assert said in result.stderr


def test_run_fails_with_a_code_of_its_own_without_a_daemon(gpulease: Program) -> None:
    assert gpulease("run", "--", "true", GPULEASE_URL="http://127.0.0.1:9").returncode == FAILED


def test_ctrl_c_in_the_queue_says_that_the_request_is_gone(client: Client, url: str, tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with client.lease(4, wait_s=60), said.open("w") as errors:
        waiting = subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "gpulease_cli", "run", "--wait", "5m", "--", "true"],
            env=environ(GPULEASE_URL=url),
            stderr=errors,
        )
        try:
            wait_until(lambda: " waits, 1st in the queue: GPUs 0-3: " in said.read_text(), 60, said.read_text)
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(60) == 130
        finally:
            waiting.kill()
            waiting.wait()
        assert said.read_text().splitlines()[1:] == ["gpulease: gave up; the request is out of the queue"]
        assert not client.leases(LeaseState.QUEUED)
