from __future__ import annotations

import subprocess
import sys

import pytest

import gpulease

HEAVY = {"torch", "fastapi", "pydantic", "sqlalchemy", "click", "rich", "numpy", "ctypes", "multiprocessing"}


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import gpulease", HEAVY | {"httpx2"}),
        ("from gpulease import Lease, NotNow", HEAVY | {"httpx2"}),
        ("from gpulease import find_usable_cuda_devices, Client", HEAVY),
        ("from gpulease import client; client.find_usable_cuda_devices", HEAVY),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not heavy & set(loaded.stdout.split())


@pytest.mark.parametrize("name", gpulease.__all__)
def test_every_public_name_is_importable(name: str) -> None:
    assert getattr(gpulease, name).__module__.partition(".")[0] in ("gpulease", "gpulease_protocol")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Lightning"):
        _ = gpulease.Lightning  # type: ignore[attr-defined]
