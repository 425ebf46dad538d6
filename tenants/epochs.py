"""Epochs: a number per tenant in Redis that moves after each change of what the tenant may do.

A worker tags whatever it read from SQL about a tenant with the epoch that it saw *before* reading; what carries another
epoch than Redis has now is stale. A writer commits SQL first, together with an outbox row, then moves the epoch and
deletes the row: a crash between the two is made good by whoever calls repair() next. An epoch lost by Redis is begun
anew from the clock, far above any that was seen before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from sqlalchemy import ColumnElement, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.db import Database
from tenants.models import EpochOutbox, Tenant
from tenants.slots import TenantSlot
from tenants.state import Client, RedisUnavailable

log = logging.getLogger(__name__)


class Epochs:
    """Reads and moves epochs."""

    def __init__(self, database: Database, redis: Client) -> None:
        self._database = database
        self._redis = redis

    async def get(self, tenant_id: str) -> int:
        """The tenant's epoch now. Raises RedisUnavailable."""
        key = TenantSlot(tenant_id).epoch
        value = await self._redis.get(key)
        if value is None:
            await self._redis.set(key, time.time_ns() // 1000, nx=True)
            value = await self._redis.get(key)
        return int(value or 0)

    @asynccontextmanager
    async def change(self, tenant_id: str) -> AsyncIterator[AsyncSession]:
        """One transaction that changes what the tenant may do or see; the epoch moves after its commit."""
        async with self._changing([tenant_id]) as session:
            yield session

    @asynccontextmanager
    async def change_all(self) -> AsyncIterator[AsyncSession]:
        """As change(), for something that concerns every tenant, such as an adapter that they share."""
        async with self._changing(None) as session:
            yield session

    @asynccontextmanager
    async def change_where(self, condition: ColumnElement[bool]) -> AsyncIterator[AsyncSession]:
        """As change(), for something that concerns the tenants that meet the condition when it is done."""
        async with self._changing(None, condition) as session:
            yield session

    @asynccontextmanager
    async def _changing(
        self, tenant_ids: list[str] | None, condition: ColumnElement[bool] | None = None
    ) -> AsyncIterator[AsyncSession]:
        async with self._database.begin() as session:
            yield session
            if tenant_ids is None:
                everyone = select(Tenant.id)
                wanted = everyone if condition is None else everyone.where(condition)
                tenant_ids = list(await session.scalars(wanted))
            if tenant_ids:
                await session.execute(insert(EpochOutbox), [{"tenant_id": tenant_id} for tenant_id in tenant_ids])
        try:
            await self.repair()
        except RedisUnavailable:
            log.warning("epochs of %d tenants will move when Redis is back", len(tenant_ids))

    async def repair(self) -> int:
        """Move every epoch that is due. → how many. Harmless to repeat: a moved epoch only makes workers read anew."""
        async with self._database.session() as session:
            due = list(await session.execute(select(EpochOutbox.id, EpochOutbox.tenant_id).order_by(EpochOutbox.id)))
        if not due:
            return 0
        await move(self._redis, {tenant_id for _, tenant_id in due})
        async with self._database.begin() as session:
            await session.execute(delete(EpochOutbox).where(EpochOutbox.id.in_([row_id for row_id, _ in due])))
        return len(due)


async def move(redis: Client, tenant_ids: Iterable[str]) -> None:
    """Whatever workers know of these tenants is out of date. Raises RedisUnavailable."""
    pipe = redis.pipeline(transaction=False)
    for tenant_id in tenant_ids:
        key = TenantSlot(tenant_id).epoch
        pipe.set(key, time.time_ns() // 1000, nx=True)
        pipe.incr(key)
    await pipe.execute()
