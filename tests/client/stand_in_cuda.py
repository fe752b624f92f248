"""Builds a fake libcuda, and runs programs with it in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpulease_protocol.launchers import strip_launcher_variables
from tests.client.using_cuda import MASK, ORDER, spelled
from tests.imported_script import Scripts
from tests.shared_library import compiled

HERE = Path(__file__).parent
SOURCE = HERE / "stand_in_cuda.c"
BUILD = ("-D_GNU_SOURCE", "-Wextra", "-Wl,-soname,libcuda.so.1")


@dataclass(frozen=True)
class Card:
    """A GPU of the fake libcuda. `kind`: `g` a whole GPU; `m` in MIG mode with a slice; `u` in MIG mode without one."""

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
    """Make programs with this LD_LIBRARY_PATH find no CUDA, even on a machine with GPUs."""
    (directory / "libcuda.so.1").write_text("not a library")


class Cuda:
    """The fake libcuda, built in a directory."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.calls = directory / "calls"
        (directory / "libcuda.so.1").write_bytes(compiled(SOURCE, *BUILD, *(f"-D{flag}" for flag in flags)))
        self.environment = {
            **{
                name: value
                for name, value in strip_launcher_variables(os.environ).items()
                if not name.startswith("GPULEASE_")
            },
            "LD_LIBRARY_PATH": str(directory),
            "STAND_IN_CALLS": str(self.calls),
        }
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment["PYTHONPATH"] = os.pathsep.join(path)
        for name in (MASK, ORDER):
            self.environment.pop(name, None)

    @cached_property
    def _scripts(self) -> Scripts:
        return Scripts(self.environment)

    def is_missing(self) -> None:
        """Make it unloadable, so that programs do not load a real one either."""
        no_cuda(Path(self.environment["LD_LIBRARY_PATH"]))

    def python(self, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program, which may `import using_cuda`."""
        return self._scripts.run(program, *arguments, environment=self.environment | more)

    def look(self, cases: Sequence[dict[str, Any]], **more: str) -> list[dict[str, Any]]:
        """The result of each case; see `using_cuda.look`."""
        program = "import os, sys, using_cuda; using_cuda.serve(sys.argv[1]); os._exit(0)"
        ran = self._scripts.run(program, json.dumps(cases), environment=self.environment | more, timeout_s=110)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]
