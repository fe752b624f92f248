"""The key from which the bearer tokens of jobs on other hosts are made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("writer", sa.Column("job_token_key", sa.String(64)))


def downgrade() -> None:
    op.drop_column("writer", "job_token_key")
