"""The probe process: reads GPUs on request, and nothing else.

`python -m gpulease_worker.probe.main SETUP NODE [SIMULATE]`, with a `ProbeSetup` as JSON. It speaks JSON lines: at
the start `{"ready": true}`; then per request `{"leases": [CachedLease, ...], "complete": BOOL, "reread": [UUID, ...]}`
on stdin one `Reading` on stdout, of the GPUs in `"only": [UUID, ...]` alone where the request has that, and for each
`{"compute_mode": ComputeModeChange}` one `ComputeModeResult`. While a GPU drains, a request also has
`"askers": [[PID, START_TICKS], ...]`, see `OpenerClassifier`.

Once ready, a thread watches each driver call. A call that takes long is named in a line of its own before the answer,
`{"under_way": CALL}`. A call that exceeds its deadline is named in the answer, and the process ends. The worker has a
deadline for the whole reading besides, and then kills the probe: the thread cannot help if this process does not run at
all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TextIO

from gpulease_protocol import codec
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import ComputeMode
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.probe import open_file_scanner, opener_classifier, process_attribution
from gpulease_worker.probe.probe_protocol import (
    ComputeModeChange,
    ComputeModeNotSet,
    ComputeModeResult,
    GpuReader,
    ProbeSetup,
    Reading,
    ReadingFailed,
)
from gpulease_worker.processes.lease_cache import CachedLease

HUNG_EXIT_CODE = 3
"""Exit code after a driver call that did not return."""
LONG_CALL_S = 0.5
"""A call that takes longer is named before it returns."""
WATCH_INTERVAL_S = 0.02
"""How often the thread checks how long a call has taken, while there is a request."""

_write_lock = threading.Lock()
"""Serializes output to the worker: lines of two threads must not mix."""


def open_reader(node: str, simulate: str | None, setup: ProbeSetup) -> GpuReader:
    """A reader of NVML, or of the simulation if one is given. Raises ReadingFailed if it cannot be used at all."""
    if simulate is not None:
        from gpulease_worker.probe.simulation import SimulatedReader  # noqa: PLC0415  load only what is used

        return SimulatedReader(simulate, node)
    try:
        from gpulease_worker.probe.nvml_reader import NvmlReader  # noqa: PLC0415  a simulated node needs no nvidia-ml-py
    except ImportError as error:
        raise ReadingFailed(f"nvidia-ml-py cannot be loaded: {error}. Install gpulease[worker].") from error
    reader = NvmlReader(node, setup)
    # The first reading opens the driver, which may take seconds; it happens before the probe reports that it is ready.
    with suppress(ReadingFailed):
        reader.read(())
    return reader


def serve(reader: GpuReader, requests: TextIO, answers: TextIO, call_deadline_s: float = 30.0) -> None:
    """Answer requests until stdin ends or the reader can never read again."""
    _write_line(answers, {"ready": True})
    busy = threading.Event()
    threading.Thread(target=_watch_driver_calls, args=(reader, answers, call_deadline_s, busy), daemon=True).start()
    known: opener_classifier.KnownProcesses = {}
    scanner = open_file_scanner.OpenFileScanner()
    last = Reading()
    for line in requests:
        request = json.loads(line)
        busy.set()
        if "compute_mode" in request:
            send(answers, change_compute_mode(reader, codec.from_json(ComputeModeChange, request["compute_mode"])))
            busy.clear()
            continue
        leases = [codec.from_json(CachedLease, lease) for lease in request["leases"]]
        askers = [ProcessId(pid, start_ticks) for pid, start_ticks in request.get("askers", ())]
        complete = request.get("complete", True)
        process_attribution.start_scan(last, leases, scanner)
        try:
            if "only" in request:
                reading = reader.read_some(request["only"], leases)
                reading, last = process_attribution.attribute_some(reading, last, leases, known, scanner, askers=askers)
            else:
                reading = reader.read(leases, complete, request.get("reread", ()))
                # A request that waits for a grant does not also wait for a long scan of open files.
                reading = last = process_attribution.attribute(
                    reading, leases, known, scanner, wait=not complete, askers=askers
                )
        except ReadingFailed as failed:
            scanner.discard()  # it would be outdated by the time of the next reading
            reading = Reading(problem=str(failed), over=failed.over)
        send(answers, reading)
        busy.clear()
        if reading.over:
            return


def send(answers: TextIO, message: Reading | ComputeModeResult) -> None:
    """Write one answer to the worker, as one line."""
    _write_line(answers, codec.to_json(message))


def _write_line(answers: TextIO, message: object) -> None:
    try:
        with _write_lock:
            answers.write(json.dumps(message) + "\n")
            answers.flush()
    except BrokenPipeError:  # the worker has died
        os._exit(0)


def _watch_driver_calls(reader: GpuReader, answers: TextIO, call_deadline_s: float, busy: threading.Event) -> None:
    """Name each call that takes long; end the process if one exceeds its deadline. Never returns. Between two requests
    (`busy` is clear) no call is made, and the thread sleeps."""
    named: tuple[str, float] | None = None
    while True:
        busy.wait()
        time.sleep(WATCH_INTERVAL_S)
        call = reader.under_way
        if call is None or time.monotonic() - call[1] <= min(LONG_CALL_S, call_deadline_s):
            continue
        name = call[0]
        if call != named:
            named = call
            _write_line(answers, {"under_way": name})
        if time.monotonic() - call[1] <= call_deadline_s:
            continue
        problem = (
            f"{name} did not answer within {call_deadline_s:g} s; the GPU driver hangs. See `dmesg` for Xid lines."
        )
        send(answers, Reading(problem=problem, over=True))
        os._exit(HUNG_EXIT_CODE)


def change_compute_mode(reader: GpuReader, change: ComputeModeChange) -> ComputeModeResult:
    """Change a GPU's compute mode, and describe the result."""
    try:
        return ComputeModeResult(found=reader.change_compute_mode(change))
    except ComputeModeNotSet as error:
        return ComputeModeResult(problem=str(error), refused=error.refused)
    except ReadingFailed as failed:
        return ComputeModeResult(problem=str(failed))


class FailedReader:
    """Stands in for a reader that cannot be opened: every reading says why."""

    def __init__(self, failed: ReadingFailed) -> None:
        self._failed = failed
        self.under_way: tuple[str, float] | None = None

    def read(self, leases: Sequence[NodeLease], complete: bool = True, reread: Collection[str] = ()) -> Reading:
        """Always raises ReadingFailed."""
        raise self._failed

    def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading:
        """Always raises ReadingFailed."""
        raise self._failed

    def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Always raises ReadingFailed."""
        raise self._failed


def main(arguments: Sequence[str]) -> int:
    """Run the probe for a node until stdin or the worker ends."""
    process_tree.signal_on_parent_death(signal.SIGKILL)
    # Output of a driver library must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = codec.from_json(ProbeSetup, json.loads(arguments[0]))
    node, simulate = arguments[1], arguments[2] if len(arguments) > 2 else None
    try:
        reader = open_reader(node, simulate, setup)
    except ReadingFailed as failed:
        reader = FailedReader(failed)
    serve(reader, sys.stdin, answers, setup.pace.call_deadline_s)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the terminal's Ctrl-C reaches the probe too; the worker ends it
        sys.exit(130)
