"""One writer: a row with the fencing term that every transaction checks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    writer = op.create_table(
        "writer",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("first_term", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_writer"),
    )
    first = sa.select(
        sa.literal(1), sa.literal(0), sa.literal(0), sa.literal("", sa.String), sa.func.current_timestamp()
    )
    op.execute(writer.insert().from_select(["id", "term", "first_term", "name", "since"], first))


def downgrade() -> None:
    op.drop_table("writer")
