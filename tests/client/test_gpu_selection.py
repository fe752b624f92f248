"""Which commands would take GPUs outside their lease, as far as their words show it."""

from __future__ import annotations

import shlex

import pytest

from gpulease_protocol.gpu_selection import outside_the_lease
from gpulease_protocol.requests import JobRequest

OUTSIDE = {
    "deepspeed --num_gpus 2 train.py": "deepspeed --num_gpus",
    "deepspeed --master_port 29500 --include=localhost:0,1 train.py": "deepspeed --include",
    "python -m deepspeed.launcher.runner -i localhost:0 train.py": "deepspeed -i",
    "/venv/bin/ds -H hosts train.py": "deepspeed -H",
    "accelerate launch --gpu_ids 0,1 train.py": "accelerate --gpu_ids",
    "env -u X A=1 CUDA_VISIBLE_DEVICES=0,2 torchrun train.py": "CUDA_VISIBLE_DEVICES=0,2",
    "sh -c 'CUDA_VISIBLE_DEVICES=0,2 torchrun train.py'": "CUDA_VISIBLE_DEVICES=0,2",
    "bash -lc 'cd /x && export CUDA_VISIBLE_DEVICES=GPU-1234\npython train.py'": "CUDA_VISIBLE_DEVICES=GPU-1234",
    "bash -c 'if true; then nohup deepspeed --num_gpus 2 train.py & fi'": "deepspeed --num_gpus",
    "env A=1 sh -c \"env CUDA_VISIBLE_DEVICES='1' python train.py\"": "CUDA_VISIBLE_DEVICES=1",
}
WITHIN = (
    "deepspeed train.py --num_gpus 2",
    "deepspeed --module package.train -i 3",
    "accelerate launch --gpu_ids all train.py",
    "torchrun --nproc_per_node 2 train.py --include x",
    "sh -c 'CUDA_VISIBLE_DEVICES= python preprocess.py'",
    "sh -c 'CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} python evaluate.py'",
    "sh -c 'echo \"CUDA_VISIBLE_DEVICES=0\"'",
    "sh -c 'cat <<EOF'",
    "sh train.sh",
    "env",
    "echo CUDA_VISIBLE_DEVICES=0",
)


@pytest.mark.parametrize("command", OUTSIDE)
def test_a_command_that_chooses_gpus_itself_is_named(command: str) -> None:
    assert str(outside_the_lease(shlex.split(command))).startswith(f"{OUTSIDE[command]} would take GPUs outside")


@pytest.mark.parametrize("command", WITHIN)
def test_a_command_that_stays_within_its_lease_passes(command: str) -> None:
    assert outside_the_lease(shlex.split(command)) is None


def test_a_job_is_refused_for_the_same() -> None:
    with pytest.raises(ValueError, match="command: deepspeed --num_gpus would take GPUs outside the lease"):
        JobRequest(command=["deepspeed", "--num_gpus", "2", "train.py"])
