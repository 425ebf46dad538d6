"""Adapters: what a version must answer before it becomes current."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("probes", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.execute("ALTER TABLE adapters DROP COLUMN probes")
