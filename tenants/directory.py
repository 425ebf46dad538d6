"""Tenants: create, change, suspend, delete. Each act and its audit entry are one transaction.

TenantNotFound     no such tenant
TenantExists       the id is taken
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.adapter_limits import check_adapter_limits
from tenants.audit import Act, Actor
from tenants.db import Database
from tenants.epochs import Epochs
from tenants.limits import (
    NAME,
    PRIORITIES,
    InvalidSettings,
    Limits,
    ModelLimits,
    check_model_limits,
    check_model_names,
    check_models,
    check_name,
    model_limits_of,
)
from tenants.models import Plan, Tenant
from tenants.plans import described
from tenants.retention import check_retention, retention_of, seconds_of


class TenantNotFound(LookupError):
    """There is no such tenant."""


class TenantExists(Exception):
    """There is a tenant with this id."""


@dataclass(frozen=True)
class TenantSpec:
    """What a tenant is asked to be. Raises InvalidSettings."""

    id: str
    name: str = ""
    weight: float = 1.0
    priority: str = "standard"
    models: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    model_limits: ModelLimits = field(default_factory=dict)
    adapter_limits: Mapping[str, int | None] = field(default_factory=dict)
    plan: str | None = None
    model_names: Mapping[str, str] = field(default_factory=dict)
    unknown_fields: str = "reject"
    retention: int | str | None = None
    suspended: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not NAME.fullmatch(self.id):
            raise InvalidSettings("id must match [A-Za-z0-9][A-Za-z0-9._-]{0,63}", "id")
        if self.name:
            check_name(self.name)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 < self.weight <= 1000:
            raise InvalidSettings("weight must be a number above 0 and up to 1000", "weight")
        if self.priority not in PRIORITIES:
            raise InvalidSettings(f"priority must be one of {', '.join(PRIORITIES)}", "priority")
        if self.unknown_fields not in ("reject", "warn"):
            raise InvalidSettings("unknown_fields must be reject or warn", "unknown_fields")
        if not isinstance(self.suspended, bool):
            raise InvalidSettings("suspended must be true or false", "suspended")
        check_models(self.models)
        check_model_limits(self.model_limits)
        check_adapter_limits(self.adapter_limits)
        check_model_names(self.model_names)
        check_retention(self.retention)


CHANGEABLE = (
    "name",
    "weight",
    "priority",
    "models",
    "limits",
    "model_limits",
    "adapter_limits",
    "plan",
    "model_names",
    "unknown_fields",
    "retention",
    "suspended",
)


class TenantDirectory:
    """All tenants."""

    def __init__(self, database: Database, epochs: Epochs) -> None:
        self._database = database
        self._epochs = epochs

    async def create(self, spec: TenantSpec, actor: Actor) -> Tenant:
        """Raises TenantExists, InvalidSettings."""
        row = Tenant(id=spec.id)
        _apply(row, spec)
        try:
            async with self._epochs.change(spec.id) as session:
                await _check_plan(session, spec)
                session.add(row)
                await session.flush()
                audit.append(session, actor, Act("tenant.create", spec.id, spec.id, after=describe(row)))
        except IntegrityError as error:
            raise TenantExists(f"tenant {spec.id!r} exists") from error
        return row

    async def get(self, tenant_id: str) -> Tenant:
        """Raises TenantNotFound."""
        async with self._database.session() as session:
            return await _find(session, tenant_id)

    async def keeping(self, tenant_id: str) -> tuple[int | None, int]:
        """How long its texts are kept (seconds_of()), and the epoch as of which that holds. Raises TenantNotFound."""
        epoch = await self._epochs.get(tenant_id)
        return seconds_of((await self.get(tenant_id)).retention_hours), epoch

    async def page(self, after: str | None = None, limit: int = 100) -> tuple[list[Tenant], bool]:
        """A page in the order of ids, and whether there are more."""
        return await self._database.page(select(Tenant), Tenant.id, after, limit)

    async def patch(self, tenant_id: str, changes: Mapping[str, Any], actor: Actor) -> Tenant:
        """Change the fields named (CHANGEABLE). `limits`: a Limits replaces all, a mapping only those that it names.

        Acts at the tenant's next request on every worker. Raises TenantNotFound, InvalidSettings.
        """
        for name in changes:
            if name not in CHANGEABLE:
                raise InvalidSettings(f"{name!r} can't be changed", name)
        async with self._epochs.change(tenant_id) as session:
            row = await _find(session, tenant_id, lock=True)
            before = describe(row)
            spec = TenantSpec(**{**_as_spec(row), **changes, "limits": Limits.of(row.limits).with_changes(changes)})
            await _check_plan(session, spec)
            _apply(row, spec)
            await session.flush()
            audit.append(session, actor, Act("tenant.update", tenant_id, tenant_id, before, describe(row)))
        return row

    async def delete(self, tenant_id: str, actor: Actor) -> None:
        """The tenant and its keys; ledger and audit log stay. Raises TenantNotFound."""
        async with self._epochs.change(tenant_id) as session:
            row = await _find(session, tenant_id, lock=True)
            await session.delete(row)
            audit.append(session, actor, Act("tenant.delete", tenant_id, tenant_id, before=describe(row)))


async def _find(session: AsyncSession, tenant_id: str, lock: bool = False) -> Tenant:
    row = await session.get(Tenant, tenant_id, with_for_update=lock or None)
    if row is None:
        raise TenantNotFound(f"tenant {tenant_id!r} does not exist")
    return row


async def _check_plan(session: AsyncSession, spec: TenantSpec) -> None:
    """The lock keeps the plan from being deleted meanwhile. Raises InvalidSettings."""
    if spec.plan is not None and await session.get(Plan, spec.plan, with_for_update={"read": True}) is None:
        raise InvalidSettings(f"there is no plan {spec.plan[:64]!r}", "plan")


def _as_spec(row: Tenant) -> dict[str, Any]:
    models = None if row.models is None else tuple(row.models)
    return {
        "id": row.id, "name": row.name, "weight": row.weight, "priority": row.priority, "models": models,
        "limits": Limits.of(row.limits), "model_limits": model_limits_of(row.model_limits),
        "adapter_limits": row.adapter_limits, "plan": row.plan, "model_names": row.model_names,
        "unknown_fields": row.unknown_fields,
        "retention": retention_of(row.retention_hours), "suspended": row.suspended,
    }  # fmt: skip


def _apply(row: Tenant, spec: TenantSpec) -> None:
    row.name = spec.name or spec.id
    row.weight = float(spec.weight)
    row.priority = spec.priority
    row.models = check_models(spec.models)
    row.limits = spec.limits.as_dict()
    row.model_limits = check_model_limits(spec.model_limits)
    row.adapter_limits = check_adapter_limits(spec.adapter_limits)
    row.plan = spec.plan
    row.model_names = check_model_names(spec.model_names)
    row.unknown_fields = spec.unknown_fields
    row.retention_hours = check_retention(spec.retention)
    row.suspended = spec.suspended


def describe(row: Tenant) -> dict[str, Any]:
    """The tenant as the audit log keeps it."""
    limits, model_limits = asdict(Limits.of(row.limits)), described(row.model_limits)
    return {**_as_spec(row), "models": row.models, "limits": limits, "model_limits": model_limits}
