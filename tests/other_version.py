"""gpulease as it was at another commit: built into a wheel, and installed in an environment of its own.

The other version is the last release that this commit comes after. Before the first release it is `FIRST`, the last
commit on the main branch before the rules for mixed versions. It comes from the history of this clone, because what ran
yesterday can only be had from there: a copy of it kept in the tree would be what we believe it was. In a shallow clone
both sides are this commit, and a warning says so.
"""

from __future__ import annotations

import configparser
import io
import subprocess
import sys
import sysconfig
import tarfile
import venv
import warnings
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "885b0feb19ff19bd19875686fec7c963903862cb"


def other_commit() -> str:
    """The commit of the other version; HEAD, with a warning, where a shallow clone does not have it."""
    released = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    commit = released.stdout.decode().strip() if released.returncode == 0 else FIRST
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
        is_shallow = _git("rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
        assert is_shallow, f"The history of this clone has no commit {commit}: FIRST names one that never landed."
        warnings.warn(
            f"This clone does not have gpulease of commit {commit[:12]}: no two versions are mixed."
            " Fetch the whole history: git fetch --unshallow --tags",
            stacklevel=1,
        )
        return "HEAD"
    return commit


def install(commit: str, directory: Path) -> Path:
    """Build the wheel of a commit and install it in a new environment below `directory`; its Python.

    What gpulease requires is taken from the environment of the tests.
    """
    source, wheels, environment = directory / "source", directory / "dist", directory / "venv"
    archive = _git("archive", "--format=tar", commit)
    assert archive.returncode == 0, archive.stderr
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    built = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(packages)
    # Only the directory, not its .pth files: those would bring the version of the tests along.
    (packages / "requirements.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = environment / "bin" / "python"
    _write_program(python, packages)
    return python


def program(python: Path) -> str:
    """The program `gpulease` beside a Python."""
    return str(python.parent / "gpulease")


def _write_program(python: Path, packages: Path) -> None:
    """Write what pip writes for the entry point of the program."""
    (listed,) = packages.glob("gpulease-*.dist-info/entry_points.txt")
    entry_points = configparser.ConfigParser()
    entry_points.read(listed)
    module, function = entry_points["console_scripts"]["gpulease"].split(":")
    script = Path(program(python))
    script.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
