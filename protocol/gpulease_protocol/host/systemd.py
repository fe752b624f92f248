"""Whether systemd runs this host: if not, no message mentions `systemctl`."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("/run/systemd/system")
"""There where systemd is process 1 (sd_booted(3))."""


def runs() -> bool:
    """True where systemd is process 1."""
    return RUNS.is_dir()
