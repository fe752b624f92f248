"""How many durable requests per second does PostgreSQL allow, compared with SQLite?

Two daemons, one on each, measured in turns. PostgreSQL is the server of the tests, with fsync on.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from bench.daemon import installed
from bench.requests import CLIENTS, GPUS, Contender, in_turns, rate, ratio
from bench.table.rows import Row, Target
from tests.databases import PostgresServer


def postgresql(quick: bool) -> list[Row]:
    """Both databases under the same clients."""
    rows = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        server = stack.enter_context(closing(PostgresServer(fsync="on"))).start()
        ports = {}
        for name, options in (("PostgreSQL", ("--database-url", server.database())), ("SQLite", ())):
            (Path(place) / name).mkdir()
            running = stack.enter_context(installed(Path(place) / name, "--simulate", str(GPUS), *options))
            ports[name] = (running.port, running.pid)
        for what, pattern, clients, formerly in (
            ("renew", "renewals", CLIENTS, ""),
            ("acquire + release", "leases", CLIENTS, "0.79 x"),
            ("acquire + release", "leases", 1, "0.52 x"),
        ):
            found = in_turns({name: Contender(pattern, *at) for name, at in ports.items()}, clients, quick)
            rows.append(
                Row(
                    question=f"PostgreSQL, {what}, {clients} client{'s'[: clients > 1]}: requests/s of SQLite",
                    formerly=formerly,
                    target=Target(bound=0.6, at_least=True),
                    figure=ratio(found["PostgreSQL"], found["SQLite"]),
                    beside="; ".join(rate(name, rounds) for name, rounds in found.items()),
                )
            )
    return rows
