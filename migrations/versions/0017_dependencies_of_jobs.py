"""What a job waits for, and its attempts before the last one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("attempt_history", sa.JSON()))
    op.add_column("job", sa.Column("after", sa.JSON()))


def downgrade() -> None:
    op.drop_column("job", "after")
    op.drop_column("job", "attempt_history")
