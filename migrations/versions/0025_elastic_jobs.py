"""How often the nodes of an elastic job have changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("regroups", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("job", sa.Column("grows_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("job", "grows_at")
    op.drop_column("job", "regroups")
