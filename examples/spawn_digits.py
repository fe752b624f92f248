"""Trains on scikit-learn's digits with ranks that the script spawns itself, by torch.multiprocessing.

    gpulease submit -n 2 -- python examples/spawn_digits.py

MASTER_ADDR and MASTER_PORT come from the lease, so that two such jobs never meet. Each rank ends by printing one JSON
line, as `ddp_digits.py` does.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, TEST_IMAGES, BATCH = 8, 359, 16


def train(rank: int, world_size: int) -> None:
    """One rank: train on its share, evaluate on its share, print the view."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world_size)
    images, digits = load_digits(return_X_y=True)
    pixels = (torch.tensor(images, dtype=torch.float32) / 16).to(device)
    classes = torch.tensor(digits).to(device)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        # All ranks draw the same order, and each takes its own part of every batch.
        for batch in (torch.randperm(len(classes) - TEST_IMAGES) + TEST_IMAGES).split(BATCH * world_size):  # type: ignore[no-untyped-call]
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels[mine]), classes[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    share = slice(rank, TEST_IMAGES, world_size)
    with torch.no_grad():
        correct = (model.module(pixels[share]).argmax(dim=1) == classes[share]).sum()
    dist.all_reduce(correct)
    view = {
        "rank": rank,
        "world_size": world_size,
        "lease_id": os.environ.get("GPULEASE_LEASE_ID"),
        "device": str(device),
        "test_images": TEST_IMAGES,
        "test_accuracy": int(correct) / TEST_IMAGES,
    }
    sys.stdout.write(json.dumps(view) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # a process that did a collective may abort at interpreter exit, after all its work is done


if __name__ == "__main__":
    ranks = len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","))
    spawn(train, args=(ranks,), nprocs=ranks)  # type: ignore[no-untyped-call]
