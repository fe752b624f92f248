"""Retention: indexes by end and by state, the last pruned event, and when a node was last seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("lease", "job"):
        op.drop_index(f"ix_{table}_state", table)
        op.create_index(f"ix_{table}_state", table, ["state", "number"])
        op.create_index(f"ix_{table}_ended_at", table, ["ended_at", "number"])
    op.add_column("node", sa.Column("seen_at", sa.DateTime(timezone=True)))
    pruned = op.create_table(
        "pruned",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pruned"),
    )
    op.execute(pruned.insert().values(id=1, seq=0))


def downgrade() -> None:
    op.drop_table("pruned")
    op.drop_column("node", "seen_at")
    for table in ("lease", "job"):
        op.drop_index(f"ix_{table}_ended_at", table)
        op.drop_index(f"ix_{table}_state", table)
        op.create_index(f"ix_{table}_state", table, ["state"])
