"""An index of events by time, for pages of a period."""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_event_at", "event", ["at", "seq"])


def downgrade() -> None:
    op.drop_index("ix_event_at", table_name="event")
