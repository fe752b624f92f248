"""Leases, jobs, GPUs, nodes, events, idempotency keys, counters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "counter",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counter")),
    )
    op.create_table(
        "event",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("cause", sa.String(length=128), nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=True),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("node", sa.String(length=255), nullable=True),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_event")),
    )
    op.create_index("ix_event_lease_id", "event", ["lease_id"])

    op.create_table(
        "gpu",
        sa.Column("uuid", sa.String(length=96), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=True),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("baseline_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpu")),
    )
    op.create_table(
        "idempotency_key",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("made", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency_key")),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("lease_id", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("grace_s", sa.Float(), nullable=False),
        sa.Column("log_directory", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("number", name=op.f("uq_job_number")),
    )
    op.create_index("ix_job_state", "job", ["state"])

    op.create_table(
        "lease",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("end_reason", sa.String(length=16), nullable=True),
        sa.Column("holder", sa.JSON(), nullable=False),
        sa.Column("demand", sa.JSON(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("port", sa.Integer(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=True),
        sa.Column("ttl_s", sa.Float(), nullable=False),
        sa.Column("liveness", sa.String(length=16), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("cause", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("granted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
        sa.UniqueConstraint("number", name=op.f("uq_lease_number")),
        sa.UniqueConstraint("token", name=op.f("uq_lease_token")),
    )
    op.create_index("ix_lease_state", "lease", ["state"])

    op.create_table(
        "node",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("driver_version", sa.String(length=64), nullable=True),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_node")),
    )


def downgrade() -> None:
    op.drop_table("node")
    op.drop_index("ix_lease_state", "lease")

    op.drop_table("lease")
    op.drop_index("ix_job_state", "job")

    op.drop_table("job")
    op.drop_table("idempotency_key")
    op.drop_table("gpu")
    op.drop_index("ix_event_lease_id", "event")

    op.drop_table("event")
    op.drop_table("counter")
