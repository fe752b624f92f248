"""A PostgreSQL connection with time limits on its waits, enforced by the client.

`statement_timeout` is enforced by the server. A server that is stopped, or cut off while the kernel still acknowledges,
enforces nothing: then the client must give up. The outcome of the statement is unknown; see `fencing`.
"""

from __future__ import annotations

from typing import Any

import psycopg

WAIT_TIMEOUT_S = 12.0
"""Over `STATEMENT_MS`, so that a server that runs answers first."""


class TimeoutConnection(psycopg.Connection[Any]):
    """Closes itself and raises OperationalError when a wait takes longer than `wait_timeout_s`."""

    wait_timeout_s = WAIT_TIMEOUT_S

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server."""
        most_s = self.wait_timeout_s if timeout is None else min(timeout, self.wait_timeout_s)
        try:
            return super().wait(gen, interval, most_s)
        except psycopg.errors._WaitTimeout as error:
            if timeout is not None and timeout < self.wait_timeout_s:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server has not answered for {most_s:.0f} s") from error
