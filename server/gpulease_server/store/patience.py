"""A PostgreSQL connection that does not wait for ever.

`statement_timeout` is kept by the server. One that is stopped, or cut off while the kernel still acknowledges, keeps
nothing: then the client has to give up. The outcome of what it waited for is unknown from then on; `term` has the
consequence.
"""

from __future__ import annotations

from typing import Any

import psycopg

PATIENCE_S = 12.0
"""Over `STATEMENT_MS`, so that a server that lives speaks first."""


class PatientConnection(psycopg.Connection[Any]):
    """Closes itself, and raises OperationalError, when one wait lasts longer than `patience_s`."""

    patience_s = PATIENCE_S

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server."""
        most_s = self.patience_s if timeout is None else min(timeout, self.patience_s)
        try:
            return super().wait(gen, interval, most_s)
        except psycopg.errors._WaitTimeout as error:
            if timeout is not None and timeout < self.patience_s:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server has not answered for {most_s:.0f} s") from error
