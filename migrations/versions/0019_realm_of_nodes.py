"""On which boot of which machine a node's worker runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node", sa.Column("realm", sa.String(128)))


def downgrade() -> None:
    op.drop_column("node", "realm")
