"""The nodes on which processes of a job do not die."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("stuck_on", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("job", "stuck_on")
