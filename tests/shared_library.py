"""Compiles the stand-ins for libraries of the driver."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def compiled(source: Path, *options: str) -> bytes:
    """A shared library, compiled once in each process of tests."""
    with TemporaryDirectory() as directory:
        library = Path(directory) / "library.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", *options, "-o", library, source], check=True)
        return library.read_bytes()
