"""The probe process: reads GPUs when it is asked, and nothing else.

`python -m gpulease_worker.probe START NODE [SIMULATE]`, with a `Start` as JSON. It speaks JSON lines: at the start
`{"ready": true}`; then for each request `{"leases": [SeenLease, ...], "fresh": BOOL, "anew": [UUID, ...]}` on stdin one
`Reading` on stdout, and for each `{"compute_mode": ModeChange}` one `ModeFound`.

Once it is ready a thread watches each call into the driver. One that takes long is named in a line of its own before
the answer, `{"under_way": CALL}`. One that is past its deadline is named in the answer, and the process ends. The
worker has a deadline for the whole beside that, and kills the probe: the thread cannot help when this process does not
run at all.
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

from gpulease import wire
from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode
from gpulease_worker import attribution, open_files, processes
from gpulease_worker.holders import SeenLease
from gpulease_worker.source import ModeChange, ModeFound, ModeNotSet, Reading, ReadingFailed, Source, Start

HUNG = 3
"""Exit code after a call that did not come back."""
LONG_S = 0.5
"""A call that takes longer is named before it has come back."""
LOOK_S = 0.02
"""How often the watching thread looks how long a call has taken."""

_one_at_a_time = threading.Lock()
"""Guards what is written for the worker: lines of two threads must not mix."""


def open_source(node: str, simulate: str | None, start: Start) -> Source:
    """NVML, or the simulation when there is one. Raises ReadingFailed when it cannot be used at all."""
    if simulate is not None:
        from gpulease_worker.simulation import Simulation  # noqa: PLC0415  each source loads only its own

        return Simulation(simulate, node)
    try:
        from gpulease_worker.hardware import Hardware  # noqa: PLC0415  a simulated node needs no nvidia-ml-py
    except ImportError as error:
        raise ReadingFailed(f"nvidia-ml-py cannot be loaded: {error}. Install gpulease[worker].") from error
    source = Hardware(node, start)
    # The first reading opens the driver, which may take seconds; it is made before the probe says that it is ready.
    with suppress(ReadingFailed):
        source.read(())
    return source


def serve(source: Source, requests: TextIO, answers: TextIO, call_deadline_s: float = 30.0) -> None:
    """Answer every request until stdin ends, or until the source can never be read again."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    threading.Thread(target=_watch, args=(source, answers, call_deadline_s), daemon=True).start()
    known: attribution.Known = {}
    looker = open_files.Looker()
    last = Reading()
    for line in requests:
        request = json.loads(line)
        if "compute_mode" in request:
            answer(answers, change_compute_mode(source, wire.from_json(ModeChange, request["compute_mode"])))
            continue
        leases = [wire.from_json(SeenLease, lease) for lease in request["leases"]]
        fresh = request.get("fresh", True)
        attribution.begin_look(last, leases, looker)
        try:
            reading = source.read(leases, fresh, request.get("anew", ()))
            # Whoever waits for a grant does not wait for a look at open files besides.
            reading = last = attribution.complete(reading, leases, known, looker, wait=not fresh)
        except ReadingFailed as failed:
            looker.forget()  # by the time there is a reading to which it belongs, it is old
            reading = Reading(problem=str(failed), over=failed.over)
        answer(answers, reading)
        if reading.over:
            return


def answer(answers: TextIO, what: Reading | ModeFound) -> None:
    """Write one answer, whole."""
    _say(answers, wire.to_json(what))


def _say(answers: TextIO, what: object) -> None:
    with _one_at_a_time:
        answers.write(json.dumps(what) + "\n")
        answers.flush()


def _watch(source: Source, answers: TextIO, call_deadline_s: float) -> None:
    """Name the call that takes long; end the process for one that is past its deadline. Ends only with it."""
    named: tuple[str, float] | None = None
    while True:
        time.sleep(LOOK_S)
        call = source.under_way
        if call is None or time.monotonic() - call[1] <= min(LONG_S, call_deadline_s):
            continue
        name = call[0]
        if call != named:
            named = call
            _say(answers, {"under_way": name})
        if time.monotonic() - call[1] <= call_deadline_s:
            continue
        problem = (
            f"{name} did not answer within {call_deadline_s:g} s; the GPU driver hangs. See `dmesg` for Xid lines."
        )
        answer(answers, Reading(problem=problem, over=True))
        os._exit(HUNG)


def change_compute_mode(source: Source, change: ModeChange) -> ModeFound:
    """What came of an order to change a GPU's compute mode."""
    try:
        return ModeFound(found=source.change_compute_mode(change))
    except ModeNotSet as error:
        return ModeFound(problem=str(error), refused=error.refused)
    except ReadingFailed as failed:
        return ModeFound(problem=str(failed))


class NoSource:
    """Stands in for a source that cannot be opened, and says why at every reading."""

    def __init__(self, failed: ReadingFailed) -> None:
        self._failed = failed
        self.under_way: tuple[str, float] | None = None

    def read(self, leases: Sequence[NodeLease], fresh: bool = True, anew: Collection[str] = ()) -> Reading:
        """Always raises ReadingFailed."""
        raise self._failed

    def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Raises the reason."""
        raise self._failed


def main(arguments: Sequence[str]) -> int:
    """Run the probe for a node until stdin ends or the worker does."""
    processes.end_with_parent(signal.SIGKILL)
    # What a driver library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    start = wire.from_json(Start, json.loads(arguments[0]))
    node, simulate = arguments[1], arguments[2] if len(arguments) > 2 else None
    try:
        source = open_source(node, simulate, start)
    except ReadingFailed as failed:
        source = NoSource(failed)
    serve(source, sys.stdin, answers, start.pace.call_deadline_s)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the terminal's Ctrl-C reaches the probe too; the worker ends it
        sys.exit(130)
