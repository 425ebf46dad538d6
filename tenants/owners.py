"""Owners: under which opaque name the KV blocks of a tenant lie in an engine. A name ends with what it was made for:
the tenant, its retention, and each period of so many hours. Blocks of names that are no more are erased by the engine,
so that nobody has to remember what is to be erased, nor where."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Row, select

from tenants.db import Database
from tenants.key_format import Pepper
from tenants.models import Tenant
from tenants.retention import seconds_of

OWNER_BYTES = 16
TenantRow = Row[str, datetime, int | None]


def cache_salt(pepper: Pepper, tenant: Tenant | TenantRow) -> str:
    """Of a tenant's prefix cache: another one under another retention, and for a tenant made again under an old id."""
    return pepper.salt(f"{tenant.id} {tenant.created_at} {tenant.retention_hours}")


def owner_of(salt: str, retention_s: int | None, now: float) -> bytes:
    """Whose blocks are those that come to be `now`, in seconds of the epoch."""
    period = int(now // retention_s) if retention_s else 0
    return hashlib.sha256(f"{salt}:{period}".encode()).digest()[:OWNER_BYTES]


class OwnerBook:
    """All tenants' names."""

    def __init__(self, database: Database, pepper: Pepper) -> None:
        self._database = database
        self._pepper = pepper

    async def owners(self, now: float) -> list[bytes]:
        """Of all tenants that there are, at this time."""
        async with self._database.session() as session:
            rows = (await session.execute(select(Tenant.id, Tenant.created_at, Tenant.retention_hours))).all()
        return await asyncio.to_thread(self._names, rows, now)

    def _names(self, rows: Sequence[TenantRow], now: float) -> list[bytes]:
        return [owner_of(cache_salt(self._pepper, row), seconds_of(row.retention_hours), now) for row in rows]
