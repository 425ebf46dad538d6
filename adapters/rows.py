"""The tables of adapters: a name, what it meant version by version, which one was current when, aliases. Rows only."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from tenants.db import Base, UtcDateTime, now
from tenants.models import RowId


class AdapterRow(Base):
    """A tenant's name for an adapter. Rows stay when retired: `last_version` must never be counted again. `canary` is a
    version that answers `canary_percent` of the conversations, 0 = none; `probes` are what a version must answer before
    it becomes current."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))  # "" = shared, so there is no foreign key
    name: Mapped[str] = mapped_column(String(64))
    current: Mapped[int] = mapped_column()
    last_version: Mapped[int] = mapped_column()
    canary: Mapped[int] = mapped_column(default=0, server_default="0")
    canary_percent: Mapped[int] = mapped_column(default=0, server_default="0")
    probes: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list, server_default="[]")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class VersionRow(Base):
    """One version: a digest, what validation found out about it, and the fingerprint of the base model that it was
    validated for ("" = unknown: from before they were kept). `companions`: file → sha256. Never changed, only retired.
    """

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
    num_added: Mapped[int] = mapped_column(default=0, server_default="0")
    base_model: Mapped[str | None] = mapped_column(Text)
    base_fingerprint: Mapped[str] = mapped_column(String(64), default="", server_default="")
    warnings: Mapped[list[str]] = mapped_column(JSON)
    companions: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime, index=True)


class AliasRow(Base):
    """`name:alias` stands for one version until it is moved."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(32), primary_key=True)
    version: Mapped[int] = mapped_column()
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now, onupdate=now)


class ActivationRow(Base):
    """`version` became current; `is_undone` once a rollback took it back. The last one that is not is current."""

    __tablename__ = "adapter_activations"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"), index=True)
    version: Mapped[int] = mapped_column()
    is_undone: Mapped[bool] = mapped_column(default=False, server_default=false())
    at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class SourceRow(Base):
    """What became of one adapter of a watched source (adapters/source_book.py)."""

    __tablename__ = "source_adapters"

    source: Mapped[str] = mapped_column(String(12), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)  # a directory's name: there may be no such tenant
    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    mark: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    code: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    param: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
