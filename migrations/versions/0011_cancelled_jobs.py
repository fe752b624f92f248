"""When a job was cancelled, since a job may be stopping for another reason."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("cancelled_at", sa.DateTime(timezone=True)))
    op.execute("UPDATE job SET cancelled_at = created_at WHERE state = 'stopping'")


def downgrade() -> None:
    op.drop_column("job", "cancelled_at")
