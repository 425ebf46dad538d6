"""Tenants: how long their texts are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("retention_hours", sa.Integer()))


def downgrade() -> None:
    op.execute("ALTER TABLE tenants DROP COLUMN retention_hours")
