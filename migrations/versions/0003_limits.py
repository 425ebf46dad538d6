"""Plans; limits of a tenant for single models."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("model_limits", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
    )
    op.add_column("tenants", sa.Column("model_limits", sa.JSON(), nullable=False, server_default="{}"))
    # Not by Alembic's batches: they copy the table on SQLite, and dropping the old one would delete what refers to it.
    op.execute("ALTER TABLE tenants ADD COLUMN plan VARCHAR(64) CONSTRAINT fk_tenants_plan_plans REFERENCES plans (id)")
    op.create_index("ix_tenants_plan", "tenants", ["plan"])


def downgrade() -> None:
    op.drop_index("ix_tenants_plan", "tenants")
    op.execute("ALTER TABLE tenants DROP COLUMN plan")
    op.execute("ALTER TABLE tenants DROP COLUMN model_limits")
    op.drop_table("plans")
