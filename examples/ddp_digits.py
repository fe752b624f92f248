"""Train a small CNN on scikit-learn's digits with DistributedDataParallel, on GPUs (nccl) or CPU (gloo).

    gpulease submit -n 2 -- examples/ddp_digits.py --epochs 20        on leased GPUs
    torchrun --nproc-per-node=2 examples/ddp_digits.py                under any torchrun
    python examples/ddp_digits.py                                     alone

Nothing here knows of gpulease: whatever launches it sets CUDA_VISIBLE_DEVICES, MASTER_ADDR and MASTER_PORT. Each rank
ends by printing one JSON line: its view of the world, and the accuracy on images that no rank has trained on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEST_IMAGES = 359
"""Images held out of the 1,797, always the same ones, whatever the seed. Odd: two ranks cannot share them evenly, so
that counting one twice would show."""
COLLECTIVE_TIMEOUT_S = 120
"""A rank that hears nothing from the others for so long fails, so that a dead peer never hangs a job."""


CHECKPOINT = "checkpoint.pt"
told_to_stop = False
"""True from SIGTERM on: a cancelled job, or one out of time, has some seconds to save what it has."""


@dataclass(frozen=True)
class Rank:
    """One rank's place in the world."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class View:
    """What one rank prints at the end, as one line of JSON."""

    rank: int
    local_rank: int
    world_size: int
    cuda_visible_devices: str | None
    lease_id: str | None
    device: str
    first_epoch: int
    """First epoch trained by this process: 1, or higher after a resume."""
    epochs: int
    test_images: int
    """How many images were evaluated by all ranks together."""
    test_accuracy: float
    """Share of them that was recognised, 0 to 1."""


def main() -> None:
    """Join the other ranks, train, evaluate, print the view."""
    options = parse(sys.argv[1:])
    # The GPUs belong to the ranks, the cores to everyone: more threads only make small models slower.
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, stop)
    place = join()
    try:
        view = train(options, place)
        if view is None:  # told to stop, and what was reached is saved
            return
        # One write with its newline: the ranks share a log, and two prints of two ranks could share a line.
        sys.stdout.write(json.dumps(asdict(view)) + "\n")
        sys.stdout.flush()
    finally:
        leave()


def stop(*_: object) -> None:
    """Note the SIGTERM; the epoch under way is finished and saved."""
    global told_to_stop  # noqa: PLW0603
    told_to_stop = True


def any_told_to_stop(place: Rank) -> bool:
    """Whether one of the ranks was told to stop: all must leave after the same epoch, or the others would wait."""
    told = torch.tensor(int(told_to_stop), device=place.device)
    dist.all_reduce(told)
    return bool(told)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. Exits with code 2 and one line of error on bad ones."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's digits with DDP.")
    parser.add_argument("--epochs", type=positive, default=20, help="epochs to train in all, resumed ones included")
    parser.add_argument("--batch-size", type=positive, default=32, help="images per step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights and the order of the images")
    parser.add_argument("--checkpoint-dir", type=Path, help="where to keep checkpoint.pt, written after every epoch")
    parser.add_argument("--resume-from", type=Path, metavar="DIR", help="go on from the checkpoint in this directory")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint there, if there is one")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher says it here as well
    options = parser.parse_args(arguments)
    if options.resume and options.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir, the directory of the run to go on with")
    if options.resume_from is not None and not (options.resume_from / CHECKPOINT).is_file():
        parser.error(f"--resume-from: there is no {CHECKPOINT} in {options.resume_from}")
    return options


def positive(text: str) -> int:
    """An integer over 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def join() -> Rank:
    """Join the process group that the environment names; without one, be a world of one rank."""
    # A lease on simulated GPUs sets CUDA_VISIBLE_DEVICES where no CUDA is: ask torch, not the environment.
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        lone_store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=lone_store, rank=0, world_size=1)
    return Rank(dist.get_rank(), local_rank, dist.get_world_size(), device)


def leave() -> None:
    """Take the process group down while the interpreter is whole.

    A model wrapped in DDP refers to itself in circles and holds the group with its threads. Whatever of them is left
    when the interpreter shuts down may abort it, after all the work is done: torchrun calls that a failed job.
    """
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def train(options: argparse.Namespace, place: Rank) -> View | None:
    """Train for the epochs that are left and evaluate once at the end; None when it was told to stop before."""
    training, test = digits()
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(
        network().to(place.device), device_ids=[place.device] if place.device.index is not None else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    checkpoint = options.checkpoint_dir and options.checkpoint_dir / CHECKPOINT
    earlier = options.resume_from / CHECKPOINT if options.resume_from else checkpoint if options.resume else None
    first_epoch = 1 + (load(earlier, model, optimizer, place) if earlier else 0)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        training, num_replicas=place.world_size, rank=place.rank, seed=options.seed
    )
    loader = DataLoader(training, batch_size=max(1, options.batch_size // place.world_size), sampler=sampler)
    for epoch in range(first_epoch, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, loader, place)
        if place.rank == 0:
            if checkpoint:
                save(checkpoint, model, optimizer, epoch)
            print(f"epoch {epoch} of {options.epochs}, loss {loss:.4f}", flush=True)
        if epoch < options.epochs and any_told_to_stop(place):
            if place.rank == 0:
                print(f"stopped after epoch {epoch} of {options.epochs}", flush=True)
            return None
    correct, seen = evaluate(model, test, place)
    return View(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        lease_id=os.environ.get("GPULEASE_LEASE_ID"),
        device=str(place.device),
        first_epoch=first_epoch,
        epochs=options.epochs,
        test_images=seen,
        test_accuracy=correct / seen,
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1,438 training and 359 test images, `(n, 1, 8, 8)` from 0 to 1, with their digits."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    classes = torch.tensor(labels, dtype=torch.int64)
    # A generator of its own: the split must not follow --seed, or a resumed run would test on images it trained on.
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(1797))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(pixels[training], classes[training]), TensorDataset(pixels[test], classes[test])


def network() -> nn.Module:
    """Two convolutions and two layers; 39,000 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
    place: Rank,
) -> float:
    """One pass over this rank's share of the training images; returns its mean loss."""
    model.train()  # type: ignore[no-untyped-call]
    total = 0.0
    for images, classes in loader:
        loss = nn.functional.cross_entropy(model(images.to(place.device)), classes.to(place.device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def evaluate(model: DistributedDataParallel, test: TensorDataset, place: Rank) -> tuple[int, int]:
    """How many test images all ranks together recognise, and how many there are.

    Rank r takes images r, r + world_size, ...: each is counted once. (DistributedSampler would repeat some to give
    every rank the same number.)
    """
    images, classes = (tensor[place.rank :: place.world_size].to(place.device) for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        # The bare module: the ranks' shares differ in size, and DDP's forward may wait for the others.
        correct = (model.module(images).argmax(dim=1) == classes).sum()
    counts = torch.stack([correct, torch.tensor(len(classes), device=place.device)])
    dist.all_reduce(counts)
    return int(counts[0]), int(counts[1])


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Replace the checkpoint atomically, so that a reader always finds a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, place: Rank) -> int:
    """Take weights and optimizer from the checkpoint; returns its epoch, 0 when there is none yet."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location=place.device, weights_only=True)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    epoch = int(checkpoint["epoch"])
    if place.rank == 0:
        print(f"resumed after epoch {epoch}", flush=True)
    return epoch


if __name__ == "__main__":
    # Writes a failure's traceback where torchrun and the job's supervisor look for it. Without it all that anyone
    # learns is exit code 1.
    record(main)()
