"""What tells a database from another one that a daemon had before, so that workers do not end the jobs of that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("writer", sa.Column("database_id", sa.String(16)))


def downgrade() -> None:
    op.drop_column("writer", "database_id")
