"""The user that the owner of a lease must run as, where its worker has to confirm that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lease", sa.Column("owner_user", sa.String(length=255)))


def downgrade() -> None:
    op.drop_column("lease", "owner_user")
