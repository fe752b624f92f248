"""For which requests leases end, and which jobs were preempted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "preemption",
        sa.Column("lease_id", sa.String(64), nullable=False),
        sa.Column("victims", sa.JSON(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("noticed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("preempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("lease_id", name="pk_preemption"),
    )
    op.add_column("job", sa.Column("preempt_at", sa.DateTime(timezone=True)))
    op.add_column("job", sa.Column("preempted", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("job", "preempted")
    op.drop_column("job", "preempt_at")
    op.execute("UPDATE lease SET end_reason = 'expired' WHERE end_reason = 'preempted'")
    op.drop_table("preemption")
