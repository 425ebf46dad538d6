"""Adapters: how many tokens a version adds to the vocabulary."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("num_added", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.execute("ALTER TABLE adapter_versions DROP COLUMN num_added")
