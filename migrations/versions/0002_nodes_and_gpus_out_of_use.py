"""Nodes and GPUs out of use: the mode of a node, the cordon of a GPU."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node", sa.Column("mode", sa.String(length=16), nullable=False, server_default="active"))
    op.add_column("gpu", sa.Column("cordoned", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("gpu", "cordoned")
    op.drop_column("node", "mode")
