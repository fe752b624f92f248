"""Whether a job's command is there, looked at before it is queued: it may wait for hours, and then fail at once."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpulease.model import Launcher


def missing(command: Sequence[str], launcher: Launcher, directory: Path, environment: Mapping[str, str]) -> str | None:
    """Why this cannot be run from `directory`, as a sentence; None when nothing is seen to be in the way.

    Goes by the worker's own rules (`gpulease_worker.launch.obstacle`), as the user who submits.
    """
    name = command[0]
    if launcher is not Launcher.PLAIN:
        # A launcher's own option comes first, such as -m: what follows is no file's name.
        there = name.startswith("-") or (directory / name).is_file()
        return None if there else f"There is no script {name!r} in {directory}."
    if "/" not in name:
        there = shutil.which(name, path=environment.get("PATH")) is not None
        return None if there else f"There is no program {name!r} on PATH."
    there = shutil.which(str(directory / name)) is not None
    return None if there else f"There is no program {name!r} in {directory}, or it may not be executed."
