"""Trains on scikit-learn's digits with Hugging Face accelerate.

    gpulease submit -n 2 --launcher accelerate -- examples/accelerate_digits.py

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
from accelerate import Accelerator
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, TEST_IMAGES = 8, 359


def train() -> dict[str, Any]:
    """Train and evaluate; this rank's view."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    images, digits = load_digits(return_X_y=True)
    pixels, classes = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    training = DataLoader(TensorDataset(pixels[TEST_IMAGES:], classes[TEST_IMAGES:]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(pixels[:TEST_IMAGES], classes[:TEST_IMAGES]), batch_size=64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, training, test = accelerator.prepare(model, optimizer, training, test)

    for _ in range(EPOCHS):
        for inputs, labels in training:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    hits = []
    for inputs, labels in test:
        with torch.no_grad():
            hits.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == labels))
    found = torch.cat(hits)
    return {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "lease_id": os.environ.get("GPULEASE_LEASE_ID"),
        "device": str(accelerator.device),
        "test_images": len(found),
        "test_accuracy": found.float().mean().item(),
    }


def leave() -> None:
    """Take the process group down while the interpreter is whole.

    Threads of it that are left when the interpreter shuts down may abort it, after all the work is done.
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
