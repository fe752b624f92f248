"""Which GPUs `run` and `acquire` ask for: `--devices`, the caller's mask, and commands that choose others."""

from __future__ import annotations

import json

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import Program

SHOW = ("--mask", "indices", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
MASK = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("devices", "mask"),
    [("0,2", "0,2"), ("[3]", "3"), ("2", "0,1"), ("1,", "1"), ("-1", "0,1,2,3"), ("auto", "0,1,2,3")],
)
def test_run_takes_every_form_of_devices(client: Client, gpulease: Program, devices: str, mask: str) -> None:
    result = gpulease("run", "--wait", "60s", "--devices", devices, *SHOW)
    assert (result.returncode, result.stdout.strip()) == (0, mask), result.stderr


def test_acquire_takes_devices_and_a_label(client: Client, gpulease: Program) -> None:
    result = gpulease("acquire", "--wait", "60s", "--devices", "1,3", "--label", "by index", "--detach", "--json")
    lease = json.loads(result.stdout)
    assert ([gpu["index"] for gpu in lease["gpus"]], lease["holder"]["label"]) == ([1, 3], "by index")
    client.release(lease["id"], lease["token"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-n", "2", "--devices", "0,1"), "-n or --devices, not both"),
        (("--devices", "0"), "--devices: a count must be -1 or 1 to 4096, not 0; GPU 0 alone is 0,"),
        (("--devices", "0,0"), "--devices: names a GPU twice"),
        (("--devices", "[0"), "--devices: is no list"),
    ],
)
@pytest.mark.parametrize("command", ["run", "acquire"])
def test_devices_that_mean_nothing_are_a_usage_error(gpulease: Program, command: str, words: tuple, why: str) -> None:
    result = gpulease(command, *words, *(("--", "true") if command == "run" else ()))
    assert result.returncode == 2
    assert why in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "mask", "said"),
    [
        (("-n", "2"), 0, "1,3", "chooses among GPUs 1, 3, as CUDA_VISIBLE_DEVICES=1,3 says"),
        (("--devices", "-1"), 0, "1,3", "chooses among"),
        (("--devices", "0,2"), 0, "0,2", "CUDA_VISIBLE_DEVICES=1,3 of this shell is not followed: --devices names"),
        (("-n", "3"), 2, "", "-n/--gpus: CUDA_VISIBLE_DEVICES=1,3 in this shell leaves 2 GPUs, not 3"),
    ],
)
def test_a_mask_of_the_calling_shell_is_followed_or_its_neglect_said(
    client: Client, gpulease: Program, words: tuple, code: int, mask: str, said: str
) -> None:
    result = gpulease("run", "--wait", "60s", *words, *SHOW, **{MASK: "1,3"})
    assert (result.returncode, result.stdout.strip()) == (code, mask), result.stderr
    assert said in result.stderr


def test_a_mask_that_shows_no_gpu_is_not_followed_and_a_lease_is_bound_to_its_own(
    client: Client, gpulease: Program
) -> None:
    result = gpulease("run", "--wait", "60s", *SHOW, **{MASK: ""})
    assert (result.returncode, result.stdout.strip()) == (0, "0")
    assert "is not followed: it shows no GPU" in result.stderr


@pytest.mark.parametrize(
    "command", [("deepspeed", "--num_gpus", "2", "ds.py"), ("sh", "-c", "CUDA_VISIBLE_DEVICES=0,2 torchrun x.py")]
)
def test_a_command_that_would_take_other_gpus_is_refused_before_anything_is_leased(
    client: Client, gpulease: Program, tmp_path, command: tuple[str, ...]
) -> None:
    (tmp_path / "deepspeed").write_text("#!/bin/sh\n")
    (tmp_path / "deepspeed").chmod(0o755)
    result = gpulease("run", "-n", "2", "--", *command, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.returncode == 2
    assert "would take GPUs outside the lease; leave it out" in result.stderr
    assert not client.leases(LeaseState.ACTIVE)


def test_under_a_lease_devices_name_some_of_its_gpus(client: Client, gpulease: Program) -> None:
    lease = client.lease(devices=[1, 3], wait_s=60)
    with lease:
        inside = {name: value for name, value in lease.environ().items() if name.startswith(("GPULEASE_LEASE", "CUDA"))}
        assert gpulease("run", "--devices", "3,", *SHOW, **inside).stdout.strip() == "3"
        assert gpulease("run", "--devices", "2", *SHOW, **inside).stdout.strip() == "1,3"
        other = gpulease("run", "--devices", "0,3", *SHOW, **inside)
        assert other.returncode == 2
        assert f"--devices: {lease.id}, the lease of this shell, has GPU 1, 3, not 0" in other.stderr
        assert "--new" in other.stderr
