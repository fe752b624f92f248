"""Python imports this when it starts a rank of a test, so that the rank need not import torch's compiler.

That takes 1.2 CPU seconds. DistributedDataParallel and the optimizers import it to learn that nothing here is compiled;
Lightning and Accelerate, for a class that nothing here is of. A test may also have the rank wait for SIGTERM.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TextIO


class OptimizedModule:
    """What torch.compile() makes."""


class OutputThatWaits:
    """Standard output. Who has printed a line with a text goes on once SIGTERM has come, which the training notes."""

    def __init__(self, file: TextIO, text: str) -> None:
        self._file = file
        self._text = text
        self._was_written = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, words: str) -> int:
        written = self._file.write(words)
        self._was_written |= self._text in words
        if self._was_written and words.endswith("\n"):
            self._was_written = False
            self._file.flush()
            until_s = time.monotonic() + 100
            while not sys.modules["__main__"].told_to_stop and time.monotonic() < until_s:
                time.sleep(0.02)
        return written


def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """The function itself, which is never compiled."""
    return function


def module(name: str, **names: object) -> ModuleType:
    """A module that stands in for one of torch."""
    made = ModuleType(name)
    vars(made).update(names)
    sys.modules[name] = made
    return made


module(
    "torch._dynamo",
    OptimizedModule=OptimizedModule,
    disable=disable,
    graph_break=lambda: None,
    eval_frame=module("torch._dynamo.eval_frame", OptimizedModule=OptimizedModule),
    trace_rules=module("torch._dynamo.trace_rules", clear_lru_cache=lambda: None),
    utils=module("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)
if "TEST_STOPPED_AFTER" in os.environ:
    sys.stdout = OutputThatWaits(sys.stdout, os.environ["TEST_STOPPED_AFTER"])
