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
    # A release that takes back no idle GPUs does not know the word, and refuses to read the lease.
    op.execute("UPDATE lease SET end_reason = 'expired' WHERE end_reason = 'reclaimed_idle'")
    op.drop_column("lease", "kept")
