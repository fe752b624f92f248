"""The owner process of a lease, and the worker that watches it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lease", sa.Column("watched_by", sa.String(length=255)))
    op.add_column("lease", sa.Column("owner_realm", sa.String(length=128)))
    op.add_column("lease", sa.Column("owner_pid", sa.Integer()))
    op.add_column("lease", sa.Column("owner_start_ticks", sa.BigInteger()))


def downgrade() -> None:
    for name in ("owner_start_ticks", "owner_pid", "owner_realm", "watched_by"):
        op.drop_column("lease", name)
