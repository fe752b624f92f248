"""The place of a lease in the queue, where that is not its number: of an attempt after one that was preempted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lease", sa.Column("place", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("lease", "place")
