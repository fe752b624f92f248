"""What `gpulease submit` is given, as the worker can start it; and whether it can, as far as this shell sees.

It is checked before the job is queued, where it might wait for hours and then fail at once. The rules are the worker's
(`gpulease_worker.jobs.launch_plan.missing_path`), applied as the submitting user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpulease_protocol.host import interpreter_check
from gpulease_protocol.launchers import LAUNCHERS, choose_launcher
from gpulease_protocol.model import Launcher, Mask

CHECK_S = 10.0
"""How long the job's Python may take to say whether it has the launcher; the worker asks again."""
SHEBANG_BYTES = 1024
Problem = tuple[str, str]
"""Why a command cannot run, and what to do."""


def startable(words: Sequence[str], launcher: Launcher | None, directory: Path, path: str | None) -> list[str]:
    """The command with a script of this directory in a form that a program can start, as sbatch takes it: `./train.sh`,
    or where that is not executable its `#!` interpreter, or sh. A program on PATH comes first, as in a shell."""
    name, *arguments = words
    if (launcher or choose_launcher(words)) is not Launcher.PLAIN:
        return list(words)
    if ("/" not in name and shutil.which(name, path=path)) or not (directory / name).is_file():
        return list(words)
    if os.access(directory / name, os.X_OK):
        return [name if "/" in name else f"./{name}", *arguments]
    interpreter = _interpreter_of_script(directory / name)
    return list(words) if interpreter is None else [*interpreter, name, *arguments]


def _interpreter_of_script(script: Path) -> list[str] | None:
    """The words of its first line after `#!`, as the kernel splits them; sh for another text, None for what is none."""
    try:
        with script.open("rb") as file:
            head = file.read(SHEBANG_BYTES)
    except OSError:
        return None
    if b"\0" in head:
        return None
    first = os.fsdecode(head.partition(b"\n")[0])
    return first[2:].strip().split(maxsplit=1) or ["/bin/sh"] if first.startswith("#!") else ["/bin/sh"]


def not_found(
    command: Sequence[str], launcher: Launcher, directory: Path, environment: Mapping[str, str]
) -> Problem | None:
    """Why the command cannot run from `directory`; None if it can."""
    name = command[0]
    path = environment.get("PATH")
    if launcher is not Launcher.PLAIN:
        # A launcher's own option may come first, such as -m: then no file is named.
        if name.startswith("-") or (directory / name).is_file():
            return None
        if shutil.which(name, path=path) is not None:
            why = f"There is no script {name!r} in {directory}; {name!r} is a program."
            return why, "Leave --launcher out, or add --launcher plain."
        return f"There is no script {name!r} in {directory}.", "Check its name and your current directory."
    if "/" not in name:
        if shutil.which(name, path=path) is not None:
            return None
        if not (directory / name).is_file():
            use_python3 = name == "python" and shutil.which("python3", path=path) is not None
            remedy = "Use python3, or activate the environment of your training." if use_python3 else "Check its name."
            return f"There is no program {name!r} on PATH and no such file in {directory}.", remedy
    elif shutil.which(str(directory / name)) is not None:
        return None
    if (directory / name).is_file():
        return f"{name!r} is not executable.", f"chmod +x {name}"
    return f"There is no program {name!r} in {directory}.", "Check its name and your current directory."


def launcher_missing(
    launcher: Launcher, command: Sequence[str], python: str | None, environment: Mapping[str, str]
) -> Problem | None:
    """Why this Python cannot start the launcher; None if it can, or does not say within `CHECK_S`."""
    modules = LAUNCHERS[launcher].modules
    if python is None or not modules:
        return None
    arguments = interpreter_check.check_arguments(python, None, modules)
    try:
        asked = subprocess.run(
            arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"The interpreter {python} cannot be started: {error.strerror}.", "Name another one: --interpreter PATH"
    said = asked.stderr.decode(errors="replace").strip()
    why = interpreter_check.missing_module(said, python, launcher.value, modules)
    if why is None:
        return None
    name = "python" if shutil.which("python", path=environment.get("PATH")) else "python3"
    plain = "" if command[0].startswith("-") else f"; without a launcher: gpulease submit -- {name} {command[0]}"
    return why, f"Name the Python that has it: --interpreter PATH{plain}"


def interpreter(named: str | None, launcher: Launcher, mask: Mask) -> str | None:
    """The Python that was named, else that of the submitting shell: of its virtual environment, else the first on PATH.

    None where the job needs none of ours: it has no launcher and does not ask CUDA for its ordinals.
    """
    if named is not None:
        return os.path.abspath(named) if "/" in named else shutil.which(named) or named
    if launcher is Launcher.PLAIN and mask is Mask.UUIDS:
        return None
    environment = os.environ.get("VIRTUAL_ENV")
    python = Path(environment) / "bin" / "python" if environment else None
    return str(python) if python and python.exists() else shutil.which("python3")
