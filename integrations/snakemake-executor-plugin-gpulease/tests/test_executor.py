"""Snakemake's own suite for executors, run with this one. It needs a daemon with at least one GPU."""

from snakemake.common.tests import TestWorkflowsLocalStorageBase
from snakemake_executor_plugin_gpulease import ExecutorSettings


class TestOnGpus(TestWorkflowsLocalStorageBase):
    """Every job becomes a job of the daemon."""

    __test__ = True

    def get_executor(self) -> str:
        return "gpulease"

    def get_executor_settings(self) -> ExecutorSettings:
        return ExecutorSettings(gpus=1)


class TestWithoutGpus(TestOnGpus):
    """No job needs a GPU, and none asks for one."""

    def get_executor_settings(self) -> ExecutorSettings:
        return ExecutorSettings()
