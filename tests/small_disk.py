"""A small file system of its own, to be filled."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs at a new directory. Skips the test where that may not be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "gpulease-test", str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs takes the right to mount one: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Write until not one byte more fits."""
    with (place / "ballast").open("ab", buffering=0) as ballast:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while ballast.write(b"x" * size):
                    pass
