"""Metrics of jobs, and an index from a job to the leases of its attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_metrics",
        sa.Column("lease_id", sa.String(64), nullable=False),
        sa.Column("series", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("lease_id", name="pk_job_metrics"),
    )
    op.create_index("ix_lease_job_id", "lease", ["job_id"])


def downgrade() -> None:
    op.drop_index("ix_lease_job_id", "lease")
    op.drop_table("job_metrics")
