"""What may be held with a bearer token, and what was."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bearer_token", sa.Column("max_gpus", sa.Integer()))
    op.add_column("bearer_token", sa.Column("max_lease_s", sa.Float()))
    op.add_column("bearer_token", sa.Column("gpu_hours_per_day", sa.Float()))
    op.create_table(
        "token_budget",
        sa.Column("token_id", sa.String(64), nullable=False),
        sa.Column("budget", sa.JSON(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("used_s", sa.Float(), nullable=False),
        sa.Column("counted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("token_id", name="pk_token_budget"),
    )


def downgrade() -> None:
    # A release without budgets does not know the word, and refuses to read the lease.
    op.execute("UPDATE lease SET end_reason = 'expired' WHERE end_reason = 'budget_spent'")
    op.drop_table("token_budget")
    op.drop_column("bearer_token", "gpu_hours_per_day")
    op.drop_column("bearer_token", "max_lease_s")
    op.drop_column("bearer_token", "max_gpus")
