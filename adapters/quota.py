"""AdapterQuota: what a tenant's adapters come to, and whether one more may come. Inside a session of the caller.

AdapterQuotaExceeded    one more would be above a limit
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapters.records import SHARED
from adapters.rows import AdapterRow, VersionRow
from tenants.adapter_limits import AdapterLimits
from tenants.directory import TenantNotFound
from tenants.models import Plan, Tenant


class AdapterQuotaExceeded(Exception):
    """`dimension` is "adapters" or "bytes"; numbers are in these."""

    def __init__(self, dimension: str, limit: int, used: int, requested: int) -> None:
        super().__init__(dimension)
        self.dimension = dimension
        self.limit = limit
        self.used = used
        self.requested = requested


@dataclass(frozen=True)
class AdapterUse:
    """What a tenant has, and may have. Shared adapters are nobody's and have no limits."""

    limits: AdapterLimits
    count: int
    bytes: int

    def check(self, count: int = 0, size_bytes: int = 0) -> None:
        """Raises AdapterQuotaExceeded when so much more would be too much."""
        for dimension, limit, used, more in (
            ("adapters", self.limits.count, self.count, count),
            ("bytes", self.limits.bytes, self.bytes, size_bytes),
        ):
            if limit is not None and more and used + more > limit:
                raise AdapterQuotaExceeded(dimension, limit, used, more)


async def read_use(session: AsyncSession, tenant_id: str, default: AdapterLimits, lock: bool = False) -> AdapterUse:
    """`lock`: nobody else adds to it before the transaction ends, and the tenant stays. Raises TenantNotFound."""
    limits = AdapterLimits()
    if tenant_id != SHARED:
        wait = {"key_share": True} if lock else None
        tenant = await session.get(Tenant, tenant_id, with_for_update=wait, populate_existing=True)
        if tenant is None:
            raise TenantNotFound(f"tenant {tenant_id!r} does not exist")
        plan = None if tenant.plan is None else await session.get(Plan, tenant.plan)
        limits = default.under({} if plan is None else plan.adapter_limits, tenant.adapter_limits)
    is_live = (AdapterRow.tenant_id == tenant_id, AdapterRow.retired_at.is_(None))
    count = await session.scalar(select(func.count()).select_from(AdapterRow).where(*is_live))
    stored = (
        select(VersionRow.digest, func.max(VersionRow.size_bytes).label("size"))
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .where(*is_live, VersionRow.retired_at.is_(None))
        .group_by(VersionRow.digest)
        .subquery()
    )
    total = await session.scalar(select(func.coalesce(func.sum(stored.c.size), 0)))
    return AdapterUse(limits, int(count or 0), int(total or 0))


async def check_room(
    session: AsyncSession, tenant_id: str, default: AdapterLimits, digest: str, size_bytes: int, count: int
) -> None:
    """For `count` more names and a version of this digest, whose bytes count once. Locks the tenant.

    Raises AdapterQuotaExceeded, TenantNotFound.
    """
    use = await read_use(session, tenant_id, default, lock=True)
    has_it = select(VersionRow.digest).join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
    has_it = has_it.where(AdapterRow.tenant_id == tenant_id, VersionRow.digest == digest)
    is_there = await session.scalar(has_it.where(VersionRow.retired_at.is_(None)).limit(1)) is not None
    use.check(count, 0 if is_there else size_bytes)
