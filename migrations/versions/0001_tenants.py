"""Tenants, keys, the usage ledger, the audit log, the outbox of epochs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _time(name: str, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _text(name: str, length: int) -> sa.Column[object]:
    return sa.Column(name, sa.String(length), nullable=False)


def _row_id() -> sa.Column[object]:
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "tenants",
        _text("id", 64),
        _text("name", 256),
        sa.Column("weight", sa.Double(), nullable=False),
        _text("priority", 16),
        sa.Column("models", sa.JSON()),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        _time("created_at"),
        _time("updated_at"),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight")),
        sa.CheckConstraint("priority IN ('interactive', 'standard', 'batch')", name=op.f("ck_tenants_priority")),
    )
    op.create_table(
        "api_keys",
        _text("id", 32),
        _text("tenant_id", 64),
        _text("name", 256),
        _text("digest", 64),
        sa.Column("pepper_version", sa.Integer(), nullable=False),
        _text("hint", 16),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON()),
        sa.Column("limits", sa.JSON(), nullable=False),
        _time("expires_at", nullable=True),
        _time("revoked_at", nullable=True),
        _time("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "usage_entries",
        _text("attempt_id", 64),
        _text("request_id", 512),
        _text("tenant_id", 64),
        _text("key_id", 32),
        _text("model", 256),
        _text("adapter", 128),
        sa.Column("adapter_version", sa.Integer()),
        _text("endpoint", 64),
        _text("status", 16),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        ),
        *(sa.Column(name, sa.Double()) for name in ("queue_s", "first_token_s", "total_s")),
        _text("user", 512),
        sa.Column("tags", sa.JSON()),
        sa.Column("day", sa.Date(), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_usage_entries"),
    )
    op.create_index("ix_usage_entries_tenant_id_created_at", "usage_entries", ["tenant_id", "created_at"])
    op.create_index("ix_usage_entries_created_at", "usage_entries", ["created_at"])
    op.create_table(
        "audit_entries",
        _row_id(),
        _time("at"),
        _text("actor", 256),
        _text("action", 64),
        _text("tenant_id", 64),
        _text("target", 256),
        sa.Column("before", sa.JSON()),
        sa.Column("after", sa.JSON()),
        _text("request_id", 512),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entries"),
    )
    op.create_index("ix_audit_entries_tenant_id_id", "audit_entries", ["tenant_id", "id"])
    op.create_table(
        "epoch_outbox",
        _row_id(),
        _text("tenant_id", 64),
        sa.PrimaryKeyConstraint("id", name="pk_epoch_outbox"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    for table in ("epoch_outbox", "audit_entries", "usage_entries", "api_keys", "tenants"):
        op.drop_table(table)
