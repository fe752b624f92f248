"""What each user has used lately."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "user_usage",
        sa.Column("user_name", sa.String(255), nullable=False),
        sa.Column("used_s", sa.Float(), nullable=False),
        sa.Column("held", sa.Float(), nullable=False),
        sa.Column("entry_s", sa.Float(), nullable=False),
        sa.Column("counted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("user_name", name="pk_user_usage"),
    )


def downgrade() -> None:
    # A release without declared times does not know the word, and refuses to read the lease.
    op.execute("UPDATE lease SET end_reason = 'expired' WHERE end_reason = 'time_over'")
    op.drop_table("user_usage")
