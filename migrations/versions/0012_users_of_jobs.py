"""The user of a job, which outlives its lease."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

lease = sa.table("lease", sa.column("id"), sa.column("holder", sa.JSON()))
job = sa.table("job", sa.column("id"), sa.column("lease_id"), sa.column("user_name"))


def upgrade() -> None:
    op.add_column("job", sa.Column("user_name", sa.String(255)))
    connection = op.get_bind()
    held = sa.select(job.c.id, lease.c.holder).join_from(job, lease, job.c.lease_id == lease.c.id)
    known = [{"of": row.id, "name": row.holder["user"]} for row in connection.execute(held) if row.holder.get("user")]
    if known:
        named = sa.update(job).where(job.c.id == sa.bindparam("of")).values(user_name=sa.bindparam("name"))
        connection.execute(named, known)


def downgrade() -> None:
    op.drop_column("job", "user_name")
