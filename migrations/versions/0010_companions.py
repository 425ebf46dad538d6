"""Adapters: what versions bring along beside their weights."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("companions", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    op.execute("ALTER TABLE adapter_versions DROP COLUMN companions")
