"""Sums of usage per day, so that reports need not read every entry."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

GROUP = "day, tenant_id, key_id, model, adapter, status"


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("adapter", sa.String(128), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "day", "key_id", "model", "adapter", "status", name="pk_usage_days"),
    )
    op.execute(
        f"INSERT INTO usage_days ({GROUP}, attempts, prompt_tokens, cached_tokens, completion_tokens) "
        f"SELECT {GROUP}, count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens) "
        f"FROM usage_entries GROUP BY {GROUP}"
    )


def downgrade() -> None:
    op.drop_table("usage_days")
