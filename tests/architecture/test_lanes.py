"""The lanes of `tests/lanes.py`: each test in one of them, what must not run together apart, and a budget kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "import time, pytest\n"
SLOW = "@pytest.mark.slow\n"
PASSES = "def test_{name}():\n    pass\n"


def run(directory: Path, content: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest with the plugin, on one file with this content."""
    (directory / "test_some.py").write_text(HEAD + content)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    soak\n    busy\n    alone\n    budget\n")
    plugins = ["-p", "tests.lanes", "-p", "no:cacheprovider", "-p", "xdist"]
    command = [sys.executable, "-m", "pytest", *plugins, "-c", str(directory / "pytest.ini"), "-v", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))}
    return subprocess.run(
        [*command, str(directory)],
        cwd=ROOT,
        env=kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_each_test_is_in_one_lane(tmp_path: Path) -> None:
    content = (
        PASSES.format(name="fast")
        + SLOW + PASSES.format(name="slow")
        + "@pytest.mark.alone\n" + PASSES.format(name="fast_alone")
        + SLOW + "@pytest.mark.alone\n" + PASSES.format(name="slow_alone")
        + "@pytest.mark.soak\n" + PASSES.format(name="soak")
    )  # fmt: skip
    for lane in ("fast", "slow", "fast-alone", "slow-alone", "soak"):
        ran = run(tmp_path, content, "--lane", lane)
        assert "1 passed, 4 deselected" in ran.stdout, ran.stdout
        assert f"::test_{lane.replace('-', '_')} PASSED" in ran.stdout


def test_the_fast_lane_does_not_import_a_slow_file(tmp_path: Path) -> None:
    content = "pytestmark = [pytest.mark.slow]\nprint('IMPORTED')\n" + PASSES.format(name="slow")
    assert "IMPORTED" not in run(tmp_path, content, "--lane", "fast", "-s").stdout
    for options in (["--lane", "slow"], []):
        ran = run(tmp_path, content, *options, "-s")
        assert "IMPORTED" in ran.stdout
        assert "1 passed" in ran.stdout


def test_a_lane_without_a_test_has_passed(tmp_path: Path) -> None:
    assert run(tmp_path, PASSES.format(name="fast"), "--lane", "slow").returncode == 0


@pytest.mark.parametrize(
    ("markers", "complaint"),
    [
        ("@pytest.mark.slow\n@pytest.mark.soak\n", "is marked both slow and soak"),
        ("@pytest.mark.soak\n@pytest.mark.slow\n", "is marked both slow and soak"),
        ("@pytest.mark.busy\n@pytest.mark.alone\n", "is marked both busy and alone"),
        ("@pytest.mark.budget(31)\n", "mark it slow"),
    ],
)
def test_markers_that_contradict_each_other_are_refused(tmp_path: Path, markers: str, complaint: str) -> None:
    ran = run(tmp_path, markers + PASSES.format(name="one"))
    assert (ran.returncode, complaint in ran.stdout + ran.stderr) == (4, True), ran.stdout


def test_busy_tests_and_those_that_share_a_fixture_stay_together(tmp_path: Path) -> None:
    content = (
        "@pytest.mark.busy\n" + PASSES.format(name="loads")
        + "@pytest.mark.busy('compute')\n" + PASSES.format(name="computes")
        + "@pytest.fixture(scope='module')\ndef shared():\n    pass\n"
        + "def test_shares(shared):\n    pass\n" + PASSES.format(name="free")
        + "@pytest.mark.xdist_group('cluster')\ndef test_named(shared):\n    pass\n"
    )  # fmt: skip
    ran = run(tmp_path, content, "-n", "2", "--dist", "loadgroup")
    assert "test_some.py::test_loads@busy\n" in ran.stdout.replace(" \n", "\n")
    assert "test_some.py::test_computes@busy compute" in ran.stdout
    assert "test_some.py::test_shares@" in ran.stdout
    assert "test_some.py::test_free@" not in ran.stdout
    assert "test_some.py::test_named@cluster\n" in ran.stdout.replace(" \n", "\n")


def test_the_group_that_takes_longest_starts_first(tmp_path: Path) -> None:
    content = (
        "@pytest.fixture(scope='module')\ndef shared():\n    pass\n"
        + "".join(f"def test_{name}(shared):\n    pass\n" for name in ("one", "two", "three"))
        + PASSES.format(name="short") + "@pytest.mark.budget(20)\n" + PASSES.format(name="long")
    )  # fmt: skip
    ran = run(tmp_path, content, "-n", "1", "--dist", "loadgroup")
    assert re.findall(r"PASSED \S+::test_(\w+)", ran.stdout) == ["long", "one", "two", "three", "short"], ran.stdout


@pytest.mark.parametrize("budget", [0.01, 20])
def test_a_test_far_over_its_budget_fails_the_run_in_ci(tmp_path: Path, budget: float) -> None:
    content = f"@pytest.mark.budget({budget})\ndef test_takes_time():\n    time.sleep(1.0)\n"
    ran = run(tmp_path, content, CI="true")
    assert ("over budget" in ran.stdout, ran.returncode) == ((True, 1) if budget < 1 else (False, 0)), ran.stdout
