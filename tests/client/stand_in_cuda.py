"""Builds the stand-in for CUDA's library, and runs programs on it in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulease.lease import scrubbed

from .using_cuda import MASK, ORDER, spelled

HERE = Path(__file__).parent
SOURCE = HERE / "stand_in_cuda.c"
BUILD = ("cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1")


@dataclass(frozen=True)
class Card:
    """A GPU of the stand-in's machine. `kind`: `g`; `m` in MIG mode, with a slice; `u` in MIG mode, without."""

    digits: str
    speed: int = 1
    kind: str = "g"

    @property
    def uuid(self) -> str:
        return spelled(self.digits)

    def as_the_daemon_knows_it(self, index: int) -> dict[str, Any]:
        """The fields of `Gpu`."""
        health = "ok" if self.kind == "g" else "mig"
        return {"uuid": self.uuid, "node": "a", "index": index, "name": f"Speed {self.speed}", "health": health}


def machine(*cards: Card) -> str:
    """The value of STAND_IN_CUDA."""
    return ",".join(f"{card.digits}:{card.speed}:{card.kind}" for card in cards)


def no_cuda(directory: Path) -> None:
    """Have programs with this LD_LIBRARY_PATH find no CUDA, on a machine with GPUs too."""
    (directory / "libcuda.so.1").write_text("not a library")


class Cuda:
    """The library in a directory."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.calls = directory / "calls"
        subprocess.run(
            [*BUILD, "-o", str(directory / "libcuda.so.1"), str(SOURCE), *(f"-D{flag}" for flag in flags)], check=True
        )
        self.environment = {
            **{name: value for name, value in scrubbed(os.environ).items() if not name.startswith("GPULEASE_")},
            "LD_LIBRARY_PATH": str(directory),
            "STAND_IN_CALLS": str(self.calls),
        }
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment["PYTHONPATH"] = os.pathsep.join(path)
        for name in (MASK, ORDER):
            self.environment.pop(name, None)

    def is_missing(self) -> None:
        """From now on: what is found is no library, so that not even a real one is loaded."""
        no_cuda(Path(self.environment["LD_LIBRARY_PATH"]))

    def python(self, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program, which may `import using_cuda`."""
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def look(self, cases: Sequence[dict[str, Any]], **more: str) -> list[dict[str, Any]]:
        """What comes of each case; see `using_cuda.look`."""
        ran = subprocess.run(
            [sys.executable, str(HERE / "using_cuda.py")],
            input="".join(json.dumps(case) + "\n" for case in cases),
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]
