"""Tenants: what becomes of request fields that nobody knows."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tenants") as table:
        table.add_column(sa.Column("unknown_fields", sa.String(8), nullable=False, server_default="reject"))
        table.create_check_constraint(op.f("ck_tenants_unknown_fields"), "unknown_fields IN ('reject', 'warn')")


def downgrade() -> None:
    with op.batch_alter_table("tenants") as table:
        table.drop_constraint(op.f("ck_tenants_unknown_fields"), type_="check")
        table.drop_column("unknown_fields")
