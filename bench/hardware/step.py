"""One step, in the process that `run` has started for it: its letter is the argument, its input comes on stdin."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from bench.hardware.checks import CHECKS
from bench.hardware.findings import Report
from bench.hardware.machine import NODE, Machine
from gpulease_protocol import codec
from gpulease_protocol.host import process_tree
from gpulease_worker.probe.nvml_reader import NvmlReader
from gpulease_worker.probe.probe_protocol import Reading, ReadingFailed

SURVEY = "survey"


def main() -> None:
    """Take the step, or read which GPUs exist."""
    process_tree.signal_on_parent_death(signal.SIGKILL)
    if sys.argv[1] == SURVEY:
        survey(Path(sys.argv[2]))
        return
    told = json.load(sys.stdin)
    reading = codec.from_json(Reading, told["reading"])
    report = Report(sys.argv[1], Path(told["results"]))
    machine = Machine(
        report=report,
        reading=reading,
        gpu=next((gpu for gpu in reading.gpus if gpu.uuid == told["gpu"]), None),
        torch=told["torch"],
        quick=told["quick"],
        place=Path(told["place"]),
    )
    check = next(check for check in CHECKS if check.letter == sys.argv[1])
    with report.asking(check.title):
        check.measure(machine)


def survey(path: Path) -> None:
    """Write a reading of every GPU, or why there is none."""
    try:
        reading = NvmlReader(NODE).read(())
    except ReadingFailed as failed:
        reading = Reading(problem=str(failed))
    path.write_text(json.dumps(codec.to_json(reading)))


if __name__ == "__main__":
    main()
