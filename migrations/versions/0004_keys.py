"""Keys: addresses, last use, legacy, rotation. Tenants: legacy names of models. Admin keys."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NEW_OF_KEYS = ("allowed_ips", "is_legacy", "rotated_from", "last_used_at")


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("allowed_ips", sa.JSON()))
    op.add_column("api_keys", sa.Column("is_legacy", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("api_keys", sa.Column("rotated_from", sa.String(32)))
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True)))
    op.add_column("tenants", sa.Column("model_names", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "admin_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("pepper_version", sa.Integer(), nullable=False),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_admin_keys"),
        sa.UniqueConstraint("digest", name="uq_admin_keys_digest"),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name=op.f("ck_admin_keys_role")),
    )


def downgrade() -> None:
    op.drop_table("admin_keys")
    op.execute("ALTER TABLE tenants DROP COLUMN model_names")
    for name in _NEW_OF_KEYS:
        op.execute(f"ALTER TABLE api_keys DROP COLUMN {name}")
