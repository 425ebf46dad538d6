"""The tables of adapters: AdapterRow (a name), VersionRow (what it meant, version by version). Rows only."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, BigInteger, ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from tenants.db import Base, UtcDateTime, now
from tenants.models import RowId


class AdapterRow(Base):
    """A tenant's name for an adapter. Rows stay when retired: `last_version` must never be counted again."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))  # "" = shared, so there is no foreign key
    name: Mapped[str] = mapped_column(String(64))
    current: Mapped[int] = mapped_column()
    last_version: Mapped[int] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class VersionRow(Base):
    """One version: a digest, and what validation found out about it. Never changed, only retired."""

    __tablename__ = "adapter_versions"

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), index=True)
    rank: Mapped[int] = mapped_column()
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    num_modules: Mapped[int] = mapped_column()
    num_tensors: Mapped[int] = mapped_column()
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    packed_bytes: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str | None] = mapped_column(Text)
    warnings: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime, index=True)
