"""The resource limits of a job (setrlimit(2)): as submitted, and never above any of its bounds.

The bounds are the hard limits of the worker, as its unit sets them, and with `--pam-service` those of the user's login
(`pam_session`). A limit that was not submitted is the login's, or else the worker's; but a job that did not ask for
core dumps writes none.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

SoftHard = tuple[int, int]
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The soft limit of open files with which this program was started."""
MOST_OPEN_FILES = 4096
"""As many as a worker may need: one for each owner that it watches, each supervisor and each log that it sends."""
COUNT = max(value for name, value in vars(resource).items() if name.startswith("RLIMIT_")) + 1
"""How many limits there are: their numbers begin with 0."""


def current() -> dict[int, SoftHard]:
    """The limits of this process, by number."""
    return {number: resource.getrlimit(number) for number in range(COUNT)}


def lower_to(bounds: Mapping[int, SoftHard]) -> None:
    """Lower the limits of this process, by number, to these. None is raised."""
    for number, bound in bounds.items():
        own = resource.getrlimit(number)
        resource.setrlimit(number, (lower(own[0], bound[0]), lower(own[1], bound[1])))


def raise_open_files() -> None:
    """Raise the soft limit of open files of this process up to MOST_OPEN_FILES, where its hard limit allows. It is 1024
    on most systems, for programs that use select(2); jobs have OPEN_FILES as before (`JobSettings`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = lower(hard, MOST_OPEN_FILES)
    if lower(soft, most) == soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def set_submitted(submitted: Mapping[str, SoftHard]) -> None:
    """Set the submitted limits, by name as in `JobSpec`, up to the hard limits of this process."""
    for name, limits in submitted.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue  # a limit that only the submitter's system has
        hard = resource.getrlimit(number)[1]
        soft, highest = (resource.RLIM_INFINITY if value < 0 else value for value in limits)
        resource.setrlimit(number, (lower(soft, hard), lower(highest, hard)))


def write_no_core() -> None:
    """Write no core dump unless the job itself raises this limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def lower(one: int, other: int) -> int:
    """The lower of two limits."""
    limited = [limit for limit in (one, other) if limit != resource.RLIM_INFINITY]
    return min(limited) if limited else resource.RLIM_INFINITY
