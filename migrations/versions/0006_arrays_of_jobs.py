"""Job arrays, and how many of their jobs run at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("array_id", sa.String(64), nullable=True))
    op.add_column("job", sa.Column("array_index", sa.BigInteger(), nullable=True))
    op.add_column("job", sa.Column("array_at_most", sa.Integer(), nullable=True))
    op.create_index("ix_job_array_id", "job", ["array_id"])


def downgrade() -> None:
    op.drop_index("ix_job_array_id", "job")
    op.drop_column("job", "array_at_most")
    op.drop_column("job", "array_index")
    op.drop_column("job", "array_id")
