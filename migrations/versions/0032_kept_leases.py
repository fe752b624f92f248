"""Until when idle GPUs of a lease are kept on purpose, and why."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lease", sa.Column("kept", sa.JSON()))


def downgrade() -> None:
    op.drop_column("lease", "kept")
