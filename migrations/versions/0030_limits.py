"""What users, groups and tokens may have, and the GPU time that counts against it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_limit",
        sa.Column("id", sa.String(320), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("members", sa.JSON(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("set_by", sa.String(255)),
        sa.PrimaryKeyConstraint("id", name="pk_usage_limit"),
    )
    op.create_table(
        "gpu_time",
        sa.Column("id", sa.String(320), nullable=False),
        sa.Column("width_s", sa.Float(), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("counted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpu_time"),
    )


def downgrade() -> None:
    op.drop_table("gpu_time")
    op.drop_table("usage_limit")
