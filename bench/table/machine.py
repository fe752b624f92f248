"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]


def describe() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python, commit and time."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int((_first('/proc/meminfo', 'MemTotal') or '0 kB').split()[0]) / 2**20:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _git("describe", "--always", "--dirty") or "not a checkout",
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def heading(machine: dict[str, str], foreign_cores: float, *, beside_load: bool, quick: bool) -> str:
    """The machine in a sentence or two."""
    text = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}; Linux {machine['kernel']}, Python "
        f"{machine['python']}; commit {machine['commit']}; {machine['at']}. "
        f"Other programs used {foreign_cores:.2f} of a core at the start."
    )
    if beside_load:
        text += " **Measured with --beside-load: other programs may have used the machine, and nothing here counts.**"
    if quick:
        text += " **Measured with --quick: few and short rounds.**"
    return text


def _first(file: str, key: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()
