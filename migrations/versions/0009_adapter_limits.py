"""Tenants and plans: how many adapters, and bytes of them."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
TABLES = ("tenants", "plans")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("adapter_limits", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    for table in reversed(TABLES):
        op.execute(f"ALTER TABLE {table} DROP COLUMN adapter_limits")
