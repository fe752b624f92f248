"""A job inherits environment, directory, umask, limits, agent and session from the process that submits it."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

from gpulease.agent_fields import agent_fields
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.variables import CA_FILE, TOKEN, TOKEN_FILE, URL
from gpulease_protocol.job_checks import RESOURCE_LIMITS
from gpulease_protocol.launchers import strip_launcher_variables

NOT_FOR_JOBS = (URL, TOKEN, TOKEN_FILE, CA_FILE, "_")
"""Variables of the submitting process that mean nothing to its job, or are secret."""


def job_fields(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of a `JobRequest` that follow from this process, so that the job runs as if it had been started here.

    `variables` are set in the job's environment beside this process's, and instead of those of the same name. Raises
    InvalidRequest where its directory has been removed.
    """
    return {
        "environment": _environment() | dict(variables or {}),
        "working_directory": _working_directory(),
        "umask": _umask(),
        "limits": _resource_limits(),
        **agent_fields(),
    }


def _environment() -> dict[str, str]:
    """This process's variables, without those of other launches and those that lead this process to the daemon: a job
    may run on another host, and gets those of its worker.

    A value that is not UTF-8 cannot be sent and is left out.
    """
    found = strip_launcher_variables(os.environ)
    kept = {name: value for name, value in found.items() if name and name not in NOT_FOR_JOBS}
    return {name: value for name, value in kept.items() if (name + value).isascii() or _is_text(name + value)}


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InvalidRequest(
            "working_directory: the current directory has been removed.", remedy="Go to another one: cd, and try again."
        ) from None


def _umask() -> int:
    """This process's umask; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _resource_limits() -> dict[str, list[int]]:
    """This process's resource limits, soft and hard; -1 for none."""
    known = {name: getattr(resource, f"RLIMIT_{name.upper()}", None) for name in RESOURCE_LIMITS}
    found = {name: resource.getrlimit(number) for name, number in known.items() if number is not None}
    # Python 3.15 says 2**64 - 1 for "unlimited".
    return {name: [-1 if one == resource.RLIM_INFINITY else one for one in limits] for name, limits in found.items()}
