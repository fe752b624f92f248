"""A job's mask of CUDA's own numbers, asked of CUDA just before the launch, as its user and in its environment.

The worker cannot answer: it is another user, in another cgroup, with other libraries, and CUDA numbers the devices that
a process can open. So two short processes of the job itself ask (`gpulease.masks`). Each starts CUDA without a mask, or
with the one that is to be tried, under the lease's marker and in the job's cgroup, and has ended before the job begins.
A number that is not known is not guessed: the job does not start, and its reason says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpulease import cuda, masks
from gpulease_worker.entry import CannotStart, Stopped
from gpulease_worker.launch import Plan, by_index

Answer = Callable[[Plan, float, str], tuple[int, str]]
"""Runs the program of a plan, for so many seconds at most and with the sentence that says that it took longer; its exit
code and output. Raises CannotStart."""
REMEDY = (
    "See what CUDA says to this user on this node; the job's `interpreter` asks it. A program that reads UUIDs can be"
    " submitted with the mask `uuids`."
)


def put(plan: Plan, answer: Answer) -> Plan:
    """The plan with a mask that names its GPUs by CUDA's numbers. Raises CannotStart."""
    assert plan.interpreter is not None
    argv = cuda.question(plan.interpreter)

    def ask(environment: Mapping[str, str]) -> list[str]:
        late = f"CUDA was asked for them, and it did not answer within {masks.ASK_S:g} s."
        code, said = answer(replace(plan, argv=argv, environment=dict(environment)), masks.ASK_S, late)
        return cuda.understood(said, code)

    try:
        numbers = masks.numbers(plan.numbered, plan.environment, ask)
    except Stopped:
        raise
    except CannotStart as error:
        raise CannotStart(f"{masks.FAILED}: {error} {REMEDY}") from error
    except cuda.CudaFailed as error:
        raise CannotStart(f"{masks.FAILED}: CUDA was asked for them, and {error}. {REMEDY}") from error
    return replace(plan, environment=plan.environment | by_index(plan.launcher, numbers))
