"""An index of the events that tell of the state of GPUs, and up to when leases are pruned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

STATE_EVENTS = sa.text(
    "kind IN ('gpu.unhealthy', 'gpu.recovered', 'gpu.foreign', 'gpu.foreign_over', 'gpu.cordoned', 'gpu.uncordoned',"
    " 'gpu.gone', 'node.unknown', 'node.ready', 'node.drained', 'node.paused', 'node.resumed', 'node.forgotten')"
)


def upgrade() -> None:
    op.add_column("pruned", sa.Column("leases_ended_at", sa.DateTime(timezone=True)))
    op.create_index("ix_event_state", "event", ["seq"], sqlite_where=STATE_EVENTS, postgresql_where=STATE_EVENTS)


def downgrade() -> None:
    op.drop_index("ix_event_state", table_name="event")
    op.drop_column("pruned", "leases_ended_at")
