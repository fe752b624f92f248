"""`gpulease mcp`: GPUs for a coding agent."""

from __future__ import annotations

import secrets

from gpulease.agent_fields import AGENT_VARIABLES
from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.option_types import DURATION
from gpulease_cli.parameters import option
from gpulease_protocol.errors import InvalidRequest

MAX_HOLD_S = 4 * 3600.0


@command(examples=("gpulease mcp", "gpulease mcp --agent claude --max-hold 1h"))
@option(
    "--agent",
    envvar=AGENT_VARIABLES["agent"],
    metavar="NAME",
    show_default="as the client names itself",
    help="The agent's name, shown as the holder of its leases.",
)
@option(
    "--session",
    envvar=AGENT_VARIABLES["session"],
    metavar="ID",
    show_default="random",
    help="Shown beside the agent, to tell its sessions apart.",
)
@option(
    "--max-hold",
    type=DURATION,
    metavar="DURATION",
    default=MAX_HOLD_S,
    show_default="4h",
    help="How long the agent may hold a lease before it must renew it.",
)
def mcp(agent: str | None, session: str | None, max_hold: float) -> None:
    """Serve GPUs to a coding agent over the Model Context Protocol, on stdin and stdout.

    Leases end with the session. Limit what the agent may hold by a token with a budget (`gpulease token create
    --max-gpus`), in GPULEASE_TOKEN.
    """
    if max_hold < 60:
        raise InvalidRequest("--max-hold: must be a minute or more.")
    with needs_extra("mcp"):
        from gpulease_mcp.server import serve_stdio  # noqa: PLC0415 - an extra
    serve_stdio(agent, session or secrets.token_hex(4), max_hold)
