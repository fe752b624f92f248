"""Gives a job a mask of CUDA's own indices, which CUDA is asked for just before the launch.

The worker cannot ask: it is another user, in another cgroup, with other libraries, and CUDA numbers the devices that a
process can open. So two short processes of the job itself do (`gpulease.cuda.index_mask`), as its user and in its
environment. Each starts CUDA without a mask, or with the one to be tested, under the lease's marker and in the job's
cgroup, and has ended before the job begins. An unknown index is not guessed: the job does not start, and its reason
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpulease.cuda import index_mask, libcuda
from gpulease_worker.jobs.launch_plan import LaunchPlan, index_mask_variables
from gpulease_worker.jobs.spawn import LaunchError, StoppedBeforeLaunch

RunBriefly = Callable[[LaunchPlan, float, str], tuple[int, str]]
"""Runs a plan's program: called with the plan, a time limit in seconds and the error for exceeding it, it returns the
exit code and the output. Raises LaunchError."""
REMEDY = (
    "See what CUDA says to this user on this node; the job's `interpreter` asks it. A program that reads UUIDs can be"
    " submitted with the mask `uuids`."
)


def with_cuda_indices(plan: LaunchPlan, run: RunBriefly) -> LaunchPlan:
    """The plan with a mask that names its GPUs by CUDA's indices. Raises LaunchError."""
    assert plan.interpreter is not None
    argv = libcuda.query_command(plan.interpreter)

    def ask(environment: Mapping[str, str]) -> list[str]:
        late = f"CUDA was asked for them, and it did not answer within {index_mask.QUERY_TIMEOUT_S:g} s."
        code, output = run(replace(plan, argv=argv, environment=dict(environment)), index_mask.QUERY_TIMEOUT_S, late)
        return libcuda.parse_output(output, code)

    try:
        indices = index_mask.cuda_indices(plan.indexed_gpus, plan.environment, ask)
    except StoppedBeforeLaunch:
        raise
    except LaunchError as error:
        raise LaunchError(f"{index_mask.FAILED}: {error} {REMEDY}") from error
    except libcuda.CudaError as error:
        raise LaunchError(f"{index_mask.FAILED}: CUDA was asked for them, and {error}. {REMEDY}") from error
    return replace(plan, environment=plan.environment | index_mask_variables(plan.launcher, indices))
