"""Trains on scikit-learn's digits with Lightning Fabric, which starts its further ranks itself.

    gpulease submit -n 2 --launcher fabric -- examples/fabric_digits.py

Each rank ends by printing one JSON line, as `ddp_digits.py` does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, TEST_IMAGES = 8, 359


def train() -> dict[str, Any]:
    """Train and evaluate; this rank's view."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fabric = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")),
        strategy="ddp",
    )
    fabric.launch()
    images, digits = load_digits(return_X_y=True)
    pixels, classes = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    training = DataLoader(TensorDataset(pixels[TEST_IMAGES:], classes[TEST_IMAGES:]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(training)

    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    # Every rank has the same weights now, and a share of the test images.
    mine = slice(fabric.global_rank, TEST_IMAGES, fabric.world_size)
    with torch.no_grad():
        hits = (model(fabric.to_device(pixels[mine])).argmax(dim=1) == fabric.to_device(classes[mine])).sum()
    correct = fabric.all_reduce(hits.float(), reduce_op="sum")
    assert isinstance(correct, Tensor)
    return {
        "rank": fabric.global_rank,
        "world_size": fabric.world_size,
        "lease_id": os.environ.get("GPULEASE_LEASE_ID"),
        "device": str(fabric.device),
        "test_images": TEST_IMAGES,
        "test_accuracy": correct.item() / TEST_IMAGES,
    }


def leave() -> None:
    """Take the process group down while the interpreter is whole.

    Lightning leaves it with gloo. Threads of it that are left when the interpreter shuts down may abort it, after all
    the work is done.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def main() -> None:
    """Print the view."""
    sys.stdout.write(json.dumps(train()) + "\n")
    sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
