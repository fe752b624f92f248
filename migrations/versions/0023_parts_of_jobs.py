"""The parts of jobs on several nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

COLUMNS = (
    ("members", sa.JSON()),
    ("go_at", sa.DateTime(timezone=True)),
    ("parts_stopped_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    for name, kind in COLUMNS:
        op.add_column("job", sa.Column(name, kind))


def downgrade() -> None:
    for name, _ in COLUMNS:
        op.drop_column("job", name)
