"""GPUs that are reserved in windows of time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "reservation",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("from_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("to_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user_name", sa.String(255)),
        sa.Column("group_name", sa.String(255)),
        sa.Column("reason", sa.Text()),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("made_by", sa.String(255)),
        sa.PrimaryKeyConstraint("id", name="pk_reservation"),
    )


def downgrade() -> None:
    op.drop_table("reservation")
