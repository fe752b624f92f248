"""Python imports this when it starts a rank of a test, so that the rank need not import torch's compiler.

That takes 1.2 CPU seconds. DistributedDataParallel and the optimizers import it to learn that nothing here is compiled;
Lightning and Accelerate, for a class that nothing here is of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class OptimizedModule:
    """What torch.compile() makes."""


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
