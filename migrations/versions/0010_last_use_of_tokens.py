"""The last day on which a bearer token was used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bearer_token", sa.Column("last_used_on", sa.Date()))


def downgrade() -> None:
    op.drop_column("bearer_token", "last_used_on")
