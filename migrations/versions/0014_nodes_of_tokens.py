"""The node that a worker's token reports for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bearer_token", sa.Column("node", sa.String(255)))


def downgrade() -> None:
    op.drop_column("bearer_token", "node")
