"""Hydra's own suites for launchers, run with this one. They need a daemon with at least one GPU."""

import pytest
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

BATCHES = ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("gpulease", [])])
class TestLauncher(LauncherTestSuite):
    """One sweep of one process."""


@pytest.mark.parametrize(("launcher_name", "overrides"), [("gpulease", BATCHES)])
class TestLauncherInBatches(BatchedSweeperTestSuite):
    """Several launches of one sweep."""


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=gpulease"])])
class TestLauncherAsProgram(IntegrationTestSuite):
    """Programs, as a user starts them."""
