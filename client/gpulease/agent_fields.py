"""For which coding agent a request is made, as the environment says."""

from __future__ import annotations

import os
from typing import Any

AGENT_VARIABLES = {"agent": "GPULEASE_AGENT", "session": "GPULEASE_SESSION"}
"""The variables that an agent sets for the programs that it starts: its name and its session's."""


def agent_fields() -> dict[str, Any]:
    """The fields `agent` and `session` of a request for a lease or a job; empty texts where there is no agent."""
    return {field: os.environ.get(variable, "") for field, variable in AGENT_VARIABLES.items()}
