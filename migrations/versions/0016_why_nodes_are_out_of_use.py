"""Why a node is out of use, in the words of the administrator, and who that is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node", sa.Column("mode_reason", sa.String(length=255)))
    op.add_column("node", sa.Column("mode_by", sa.String(length=255)))


def downgrade() -> None:
    op.drop_column("node", "mode_by")
    op.drop_column("node", "mode_reason")
