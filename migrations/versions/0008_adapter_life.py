"""Adapters: aliases, which version was current when, canaries, the base model that a version is for."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    for name in ("canary", "canary_percent"):
        op.add_column("adapters", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("adapter_versions", sa.Column("base_fingerprint", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", row_id, nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_adapter_aliases"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_aliases_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "adapter_activations",
        sa.Column("id", row_id, nullable=False),
        sa.Column("adapter_id", row_id, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("is_undone", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_activations"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_activations_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_activations_adapter_id", "adapter_activations", ["adapter_id"])
    op.execute(
        "INSERT INTO adapter_activations (adapter_id, version, at) "
        "SELECT id, current, updated_at FROM adapters WHERE retired_at IS NULL"
    )


def downgrade() -> None:
    op.drop_table("adapter_activations")
    op.drop_table("adapter_aliases")
    op.execute("ALTER TABLE adapter_versions DROP COLUMN base_fingerprint")
    for name in ("canary_percent", "canary"):
        op.execute(f"ALTER TABLE adapters DROP COLUMN {name}")
