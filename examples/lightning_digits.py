"""Trains on scikit-learn's digits with Lightning's Trainer, which starts its further ranks itself.

    gpulease submit -n 2 --launcher lightning -- examples/lightning_digits.py

The job is given its GPUs as all that it can see, and a MASTER_PORT of its own: `devices` is how many there are. With
`--nodes 2` it is started on two nodes, and NNODES says so. Each rank ends by printing one JSON line, as
`ddp_digits.py` does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, TEST_IMAGES = 16, 359


class Digits(LightningModule):
    """Two layers, one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Counts what is recognised, over all ranks."""
        hits = (self.layers(batch[0]).argmax(dim=1) == batch[1]).float()
        self.log("accuracy", hits.mean(), sync_dist=True, batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train() -> dict[str, Any]:
    """Train and evaluate; this rank's view."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits))  # the images are sorted by who wrote them
    pixels, classes = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]
    training = DataLoader(TensorDataset(pixels[TEST_IMAGES:], classes[TEST_IMAGES:]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(pixels[:TEST_IMAGES], classes[:TEST_IMAGES]), batch_size=60)
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")),
        num_nodes=int(os.environ.get("NNODES", "1")),
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, training)
    accuracy = trainer.validate(model, test, verbose=False)[0]["accuracy"]
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "lease_id": os.environ.get("GPULEASE_LEASE_ID"),
        "device": str(trainer.strategy.root_device),
        "test_accuracy": accuracy,
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
