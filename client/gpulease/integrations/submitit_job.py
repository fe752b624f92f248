"""Runs the tasks of one submitit job, on its node: `python -m gpulease.integrations.submitit_job FOLDER`.

It is submitit's own controller of local jobs: it starts the tasks, writes their logs, tells them when their time is
nearly over, and starts them again when they ask for it, under the same lease. Its exit code is that of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from submitit.local.local import Controller

OUT_OF_TIME = 124


class JobController(Controller):
    """A controller that names its files after the daemon's job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pid = os.environ["GPULEASE_JOB_ID"]
        self.folder = Path(str(folder).replace("%j", self.pid))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._codes: Sequence[int | None] = ()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """The exit codes of the tasks; None for one that goes on after its time."""
        self._codes = super().wait(freq)
        return self._codes

    def exit_code(self) -> int:
        """0 if all tasks succeeded, else the code of the first that did not."""
        codes = (OUT_OF_TIME if code is None else code if code >= 0 else 128 - code for code in self._codes)
        return next((code for code in codes if code != 0), 0)


def main() -> None:
    """Run the tasks until they have ended."""
    controller = JobController(Path(sys.argv[1]))
    print(f"The output of the tasks is in {controller.folder}.", flush=True)
    controller.run()
    sys.exit(controller.exit_code())


if __name__ == "__main__":
    main()
