"""How Alembic reaches the database and the tables."""

from __future__ import annotations

from alembic import context

from gpulease_server.store.database import connect
from gpulease_server.store.tables import metadata


def run(connection: object) -> None:
    """Run the migrations on an open connection, in one transaction."""
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)  # type: ignore[arg-type]
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with connect(context.config.get_main_option("sqlalchemy.url") or "").begin() as opened:
        run(opened)
