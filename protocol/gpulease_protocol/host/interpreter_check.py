"""Checks that a job's own Python works, can read the script, and has the launcher: run by that Python, imports nothing.

`gpulease submit` asks before the job is queued, where it might wait for hours and then fail at once; the job's
supervisor asks again, as the job's user and on its node.
"""

from __future__ import annotations

from collections.abc import Sequence

INSTALL = "Install it there, or name the interpreter that has it."
_PROGRAM = """
import importlib.util, sys
script, *names = sys.argv[1:]
if script:
    try:
        open(script, "rb").close()
    except OSError as error:
        sys.exit(f"script {error.strerror}")
specs = [importlib.util.find_spec(name) for name in names]
if names and not any(spec is not None and spec.origin is not None for spec in specs):
    sys.exit("module")
"""
"""A directory of a module's name without `__init__.py` is no installation."""


def check_arguments(python: str, script: str | None, modules: Sequence[str]) -> tuple[str, ...]:
    """Arguments that make this Python check for a script, and for any one of these modules."""
    return (python, "-c", _PROGRAM, script or "", *modules)


def missing_module(output: str, python: str, launcher: str, modules: Sequence[str]) -> str | None:
    """What the check found to be missing, as a sentence; None where it is not the launcher's module."""
    if output != "module":
        return None
    return f"{launcher} is not installed for {python}: it has no module {' or '.join(modules)}."
