"""`gpulease-wrap` as the wrapper scripts of other projects call it.

The two functions of `WRAPPER` stand for speediedan/finetuning-scheduler's scripts/gpu_lease_wrap.sh: how they call
GPU_LEASE_CMD, and when they trust GPU_LEASE_HELD. Its own file passes the same way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import environ, wait_until
from tests.docs.pages import ROOT, blocks

WRAPPER = """
held() {
    pid="${GPU_LEASE_HELD##*:}"
    [ -n "${GPU_LEASE_HELD:-}" ] && kill -0 "$pid" 2>/dev/null
}
maybe_lease() {
    if held; then "$@"
    elif [ -x "$GPU_LEASE_CMD" ]; then "$GPU_LEASE_CMD" ${GPU_LEASE_ARGS:-} --project "${PROJECT:-suite}" -- "$@"
    else echo unleased; fi
}
"""


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """What GPU_LEASE_CMD names."""
    path = tmp_path / "gpulease-wrap"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom gpulease_cli.lease_wrapper import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def shell(url: str, executable: Path, tmp_path: Path):
    """Runs a shell script in which `maybe_lease` is the wrapper."""

    def run(script: str, **more: str) -> subprocess.CompletedProcess[str]:
        variables = environ(GPULEASE_URL=url, GPU_LEASE_CMD=str(executable)) | more
        command = ["sh", "-c", WRAPPER + script]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )

    return run


def test_a_wrapped_command_has_every_gpu_a_label_and_a_holder_that_lives(client: Client, shell) -> None:
    command = "echo $CUDA_VISIBLE_DEVICES; kill -0 ${GPU_LEASE_HELD##*:} && echo ${GPU_LEASE_HELD%:*}; sleep 600"
    script = f"maybe_lease sh -c '{command.replace('sleep 600', 'exit 7')}'"
    result = shell(script, PROJECT="my suite")
    assert result.returncode == 7, result.stderr
    mask, holder = result.stdout.split()
    assert (len(mask.split(",")), holder) == (4, "gpulease")
    assert client.leases(label="my suite")[0].end_reason == "released"


@pytest.mark.budget(15)
def test_a_wrapper_in_a_wrapper_does_not_ask_again_and_a_stale_holder_is_not_believed(
    client: Client, shell, tmp_path: Path
) -> None:
    (tmp_path / "inner.sh").write_text(
        f"{WRAPPER}maybe_lease echo trusted $GPU_LEASE_HELD; \"$GPU_LEASE_CMD\" -- sh -c 'exit 5'"
    )
    result = shell("export GPU_LEASE_HELD=gpulease:2147483646; maybe_lease sh inner.sh")
    assert result.returncode == 5, result.stderr
    assert result.stdout.startswith("trusted gpulease:")
    assert "2147483646" not in result.stdout
    assert len(client.leases(label="suite")) == 1, "the one inside took none"
    stale = shell('"$GPU_LEASE_CMD" --doctor', GPU_LEASE_HELD="gpulease:2147483646")
    assert stale.returncode == 1
    assert "GPU_LEASE_HELD=gpulease:2147483646 is stale" in stale.stderr


@pytest.mark.budget(15)
def test_a_wait_that_has_ended_exits_with_75_and_a_processor_lease_is_not_promised(client: Client, shell) -> None:
    with client.lease(count=1, wait_s=60):
        result = shell("maybe_lease true", GPU_LEASE_ARGS="--timeout 1 --cpu-heavy")
        assert result.returncode == 75, result.stderr
        assert "leases only GPUs" in result.stderr
        assert shell("maybe_lease true", GPU_LEASE_ARGS="--gpus 3 --timeout 60").returncode == 0
    assert "held" not in shell('"$GPU_LEASE_CMD" --status').stderr
    assert "GPU" in shell('"$GPU_LEASE_CMD" --status').stdout


@pytest.mark.budget(20)
def test_a_holder_keeps_the_gpus_from_one_step_to_the_next(client: Client, shell, tmp_path: Path) -> None:
    held = shell('eval "$("$GPU_LEASE_CMD" --hold --pidfile gpu.pid --project ci --timeout 60)"; echo $GPU_LEASE_HELD')
    pid = int((tmp_path / "gpu.pid").read_text())
    assert (held.returncode, held.stdout.strip()) == (0, f"gpulease:{pid}"), held.stderr
    (lease,) = client.leases(LeaseState.ACTIVE)
    assert (len(lease.gpus), lease.holder.label, lease.holder.owner_pid) == (4, "ci", pid)
    again = shell('"$GPU_LEASE_CMD" --hold --pidfile gpu.pid')
    assert again.returncode == 1
    assert f"process {pid} holds GPUs" in again.stderr
    assert shell('"$GPU_LEASE_CMD" --hold --pidfile other.pid --timeout 1').returncode == 75
    assert shell('"$GPU_LEASE_CMD" --release --pidfile gpu.pid').returncode == 0
    assert client.lease_by_id(lease.id).end_reason == "released"
    assert not (tmp_path / "gpu.pid").exists()
    nothing = shell('"$GPU_LEASE_CMD" --release --pidfile gpu.pid')
    assert nothing.returncode == 0
    assert "nothing to release" in nothing.stderr


@pytest.mark.parametrize(("words", "code"), [("--pidfile gpu.pid --timeout 0.1", 75), ("--pidfil gpu.pid", 2), ("", 2)])
def test_a_step_whose_hold_fails_does_not_go_on_without_gpus(client: Client, shell, words: str, code: int) -> None:
    with client.lease(count=4, wait_s=60):
        held = shell(f'set -e; eval "$("$GPU_LEASE_CMD" --hold {words})"; echo trains')
    assert (held.returncode, held.stdout) == (code, ""), held.stderr


def test_only_hold_writes_for_a_shell(shell) -> None:
    failed = shell('"$GPU_LEASE_CMD" --timeout 60 -- sh -c "exit 3" --hold')
    assert (failed.returncode, failed.stdout) == (3, ""), failed.stderr


def test_a_pidfile_that_a_killed_holder_left_is_no_ones(client: Client, shell, tmp_path: Path) -> None:
    assert shell('"$GPU_LEASE_CMD" --hold --pidfile gpu.pid --gpus 1 --timeout 60').returncode == 0
    pid = int((tmp_path / "gpu.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not client.leases(LeaseState.ACTIVE))
    with subprocess.Popen(["sleep", "600"]) as innocent:
        (tmp_path / "gpu.pid").write_text(f"{innocent.pid}\n")
        result = shell('"$GPU_LEASE_CMD" --release --pidfile gpu.pid')
        assert "nothing to release" in result.stderr
        assert innocent.poll() is None, "its pid was used again"
        innocent.kill()


@pytest.mark.parametrize(
    "words", ["", "--hold", "--release", "--status -- true", "--pidfile x -- true", "--gpus x -- y"]
)
def test_what_means_nothing_is_a_usage_error(shell, words: str) -> None:
    assert shell(f'"$GPU_LEASE_CMD" {words}').returncode == 2


@pytest.mark.budget(20)
def test_its_page_is_as_it_says(client: Client, shell, tmp_path: Path) -> None:
    (page,) = [block.text for block in blocks(ROOT / "docs/tools/lease-wrapper.md") if block.language == "bash"]
    (tmp_path / "suite.sh").write_text("#!/bin/sh\necho tested\n")
    (tmp_path / "suite.sh").chmod(0o755)
    (tmp_path / "train.py").write_text("print('trained')\n")
    result = shell(f"set -e\n{page}", PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("tested\ntrained\nGPU "), result.stdout
    assert "released the GPUs" in result.stderr
