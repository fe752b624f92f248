"""The members of leases over several nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lease", sa.Column("members", sa.JSON()))


def downgrade() -> None:
    op.drop_column("lease", "members")
