"""An agent for the tests of `gpulease mcp`: the SDK's own client, over stdio. For the scripts of test_mcp.py."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client


class ToolFailed(Exception):
    """A tool answered with an error, which is the text that the model would read."""


class Agent:
    """One agent, and its server."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """What a tool answers, structured."""
        result: Any = await self.client.call_tool(tool, arguments)
        if result.is_error:
            raise ToolFailed(result.content[0].text)
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def granted(self, **arguments: Any) -> dict[str, Any]:
        """A lease, once it is granted: asked for, and waited for as the answers say."""
        lease = await self.call("request_lease", **arguments)
        while lease["state"] == "queued":
            lease = (await self.call("wait", id=lease["lease_id"], seconds=25))["lease"]
        assert lease["state"] == "active", lease
        return lease


@asynccontextmanager
async def agent(session: str, *options: str, **environment: str) -> AsyncIterator[Agent]:
    """An agent with a server of its own, which ends with the block."""
    arguments = ["-m", "gpulease_cli", "mcp", "--session", session, *options]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ) | environment)
    async with Client(stdio_client(parameters)) as client:
        yield Agent(client)
