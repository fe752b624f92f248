"""The metrics of leases and the history of GPUs in one table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gpu_metrics",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("gpu_uuid", sa.String(96)),
        sa.Column("width_s", sa.Integer()),
        sa.Column("start_s", sa.BigInteger()),
        sa.Column("series", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpu_metrics"),
    )
    op.create_index("ix_gpu_metrics_gpu_uuid", "gpu_metrics", ["gpu_uuid", "width_s", "start_s"])
    op.create_index("ix_gpu_metrics_width_s", "gpu_metrics", ["width_s", "start_s"])
    op.execute("INSERT INTO gpu_metrics (id, series) SELECT lease_id, series FROM job_metrics")
    op.drop_table("job_metrics")


def downgrade() -> None:
    op.create_table(
        "job_metrics",
        sa.Column("lease_id", sa.String(64), nullable=False),
        sa.Column("series", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("lease_id", name="pk_job_metrics"),
    )
    op.execute("INSERT INTO job_metrics (lease_id, series) SELECT id, series FROM gpu_metrics WHERE gpu_uuid IS NULL")
    op.drop_table("gpu_metrics")
