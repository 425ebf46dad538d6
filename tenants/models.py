"""The tables of tenants: plans, tenants, keys, usage, audit, the outbox of epochs. Rows only, no behaviour."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, Integer, String, false
from sqlalchemy.orm import Mapped, mapped_column

from tenants.db import Base, UtcDateTime, now

RowId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up only an INTEGER primary key."""


class Plan(Base):
    """A named set of limits that tenants refer to; `model_limits` by the name of a model."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    model_limits: Mapped[dict[str, dict[str, Any]]] = mapped_column(JSON, default=dict)
    adapter_limits: Mapped[dict[str, int | None]] = mapped_column(JSON, default=dict, server_default="{}")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now, onupdate=now)


class Tenant(Base):
    """Who may ask. `models` are names or globs, null = all it can see; `limits` holds only what is limited;
    `retention_hours` null = as the settings say, 0 = no text is kept."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("weight > 0", name="weight"),
        CheckConstraint("priority IN ('interactive', 'standard', 'batch')", name="priority"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(256))
    weight: Mapped[float] = mapped_column(default=1.0)
    priority: Mapped[str] = mapped_column(String(16), default="standard")
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    model_limits: Mapped[dict[str, dict[str, Any]]] = mapped_column(JSON, default=dict, server_default="{}")
    adapter_limits: Mapped[dict[str, int | None]] = mapped_column(JSON, default=dict, server_default="{}")
    model_names: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    plan: Mapped[str | None] = mapped_column(ForeignKey("plans.id"), index=True)
    unknown_fields: Mapped[str] = mapped_column(String(8), default="reject", server_default="reject")
    retention_hours: Mapped[int | None] = mapped_column()
    suspended: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now, onupdate=now)


class ApiKey(Base):
    """A key, found by its public id. `digest` = HMAC-SHA-256(pepper, SHA-256(key)); the key itself is kept nowhere."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(256))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    pepper_version: Mapped[int] = mapped_column(default=1)
    hint: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    allowed_ips: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    is_legacy: Mapped[bool] = mapped_column(default=False, server_default=false())
    rotated_from: Mapped[str | None] = mapped_column(String(32))
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class AdminKey(Base):
    """A key of an administrator. The row "settings" stands for the key of the settings, which has no digest here."""

    __tablename__ = "admin_keys"
    __table_args__ = (CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(256))
    role: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    pepper_version: Mapped[int] = mapped_column()
    hint: Mapped[str] = mapped_column(String(16))
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class UsageEntry(Base):
    """What one attempt of one request used. Written once per attempt; corrected only by further entries.

    `day` is that of created_at, in UTC. No foreign keys: the ledger outlives tenants and keys.
    """

    __tablename__ = "usage_entries"
    __table_args__ = (Index(None, "tenant_id", "created_at"), Index(None, "created_at"))

    attempt_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(512), default="")
    tenant_id: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(32))
    model: Mapped[str] = mapped_column(String(256))
    adapter: Mapped[str] = mapped_column(String(128), default="")
    adapter_version: Mapped[int | None] = mapped_column()
    endpoint: Mapped[str] = mapped_column(String(64), default="")
    status: Mapped[str] = mapped_column(String(16))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    queue_s: Mapped[float | None] = mapped_column()
    first_token_s: Mapped[float | None] = mapped_column()
    total_s: Mapped[float | None] = mapped_column()
    user: Mapped[str] = mapped_column(String(512), default="")
    tags: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    day: Mapped[date] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class UsageDay(Base):
    """Sums of the entries of one day, changed in the transactions that write entries. Corrections are no attempts."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(128), primary_key=True)
    status: Mapped[str] = mapped_column(String(16), primary_key=True)
    attempts: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class AuditEntry(Base):
    """One act of an administrator, written in the transaction that did it."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    actor: Mapped[str] = mapped_column(String(256))
    action: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[str] = mapped_column(String(64), default="")
    target: Mapped[str] = mapped_column(String(256), default="")
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    request_id: Mapped[str] = mapped_column(String(512), default="")


class EpochOutbox(Base):
    """A tenant whose epoch must still be moved in Redis, because something about it was committed here.

    Ids are never used again: a row is deleted by its id after the move, maybe by two workers.
    """

    __tablename__ = "epoch_outbox"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
