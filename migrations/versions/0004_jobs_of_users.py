"""The user that a job runs as, and the traceback of the rank that failed first."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("traceback", sa.Text(), nullable=True))
    op.add_column("job", sa.Column("uid", sa.BigInteger(), nullable=True))
    op.add_column("job", sa.Column("gid", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "gid")
    op.drop_column("job", "uid")
    op.drop_column("job", "traceback")
