"""The audit log: append in the caller's transaction, list. Knows nothing of what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.db import Database
from tenants.models import AuditEntry


@dataclass(frozen=True)
class Actor:
    """Who acts, in which HTTP request (or other act) it was asked, and whether they have every right there is."""

    name: str
    request_id: str = ""
    is_admin: bool = False


@dataclass(frozen=True)
class Act:
    """What was done: `action` such as "tenant.create", the tenant it concerns ("" = all), the object, before, after."""

    action: str
    tenant_id: str = ""
    target: str = ""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AuditQuery:
    """Which entries: those that are equal in all that is given, from `start` until before `end`."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    request_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None


def append(session: AsyncSession, actor: Actor, act: Act) -> None:
    """Add the entry to the session's transaction: the act and its entry are committed together or not at all."""
    session.add(
        AuditEntry(
            actor=actor.name, request_id=actor.request_id, action=act.action, tenant_id=act.tenant_id,
            target=act.target, before=None if act.before is None else dict(act.before),
            after=None if act.after is None else dict(act.after),
        )
    )  # fmt: skip


class AuditLog:
    """Reads the log, newest first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, tenant_id: str | None = None, before_id: int | None = None, limit: int = 100,
        wanted: AuditQuery | None = None,
    ) -> list[AuditEntry]:  # fmt: skip
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if tenant_id is not None:
            query = query.where(AuditEntry.tenant_id == tenant_id)
        if before_id is not None:
            query = query.where(AuditEntry.id < before_id)
        for name in ("actor", "action", "target", "request_id"):
            value = getattr(wanted, name, None)
            if value is not None:
                query = query.where(getattr(AuditEntry, name) == value)
        if wanted is not None and wanted.start is not None:
            query = query.where(AuditEntry.at >= wanted.start)
        if wanted is not None and wanted.end is not None:
            query = query.where(AuditEntry.at < wanted.end)
        async with self._database.session() as session:
            return list(await session.scalars(query))
