"""Tenants: what becomes of request fields that nobody knows."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("unknown_fields", sa.String(8), nullable=False, server_default="reject"))


def downgrade() -> None:
    op.execute("ALTER TABLE tenants DROP COLUMN unknown_fields")
