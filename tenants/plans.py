"""Plans: named sets of limits that tenants refer to. What a tenant limits itself goes before what its plan says.

PlanNotFound     no such plan
PlanExists       the id is taken
PlanInUse        tenants refer to it
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
from tenants.limits import NAME, InvalidSettings, Limits, ModelLimits, check_model_limits, model_limits_of
from tenants.models import Plan, Tenant


class PlanNotFound(LookupError):
    """There is no such plan."""


class PlanExists(Exception):
    """There is a plan with this id."""


class PlanInUse(Exception):
    """Tenants refer to this plan."""


@dataclass(frozen=True)
class PlanSpec:
    """What a plan is asked to be. Raises InvalidSettings."""

    id: str
    limits: Limits = field(default_factory=Limits)
    model_limits: ModelLimits = field(default_factory=dict)
    adapter_limits: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.id):
            raise InvalidSettings("id must match [A-Za-z0-9][A-Za-z0-9._-]{0,63}", "id")
        check_model_limits(self.model_limits)
        check_adapter_limits(self.adapter_limits)


class PlanBook:
    """All plans."""

    def __init__(self, database: Database, epochs: Epochs) -> None:
        self._database = database
        self._epochs = epochs

    async def create(self, spec: PlanSpec, actor: Actor) -> Plan:
        """Raises PlanExists."""
        row = Plan(id=spec.id)
        _apply(row, spec)
        try:
            async with self._database.begin() as session:
                session.add(row)
                await session.flush()
                audit.append(session, actor, Act("plan.create", target=spec.id, after=describe(row)))
        except IntegrityError as error:
            raise PlanExists(f"plan {spec.id!r} exists") from error
        return row

    async def get(self, plan_id: str) -> Plan:
        """Raises PlanNotFound."""
        async with self._database.session() as session:
            return await _find(session, plan_id)

    async def page(self, after: str | None = None, limit: int = 100) -> tuple[list[Plan], bool]:
        """A page in the order of ids, and whether there are more."""
        return await self._database.page(select(Plan), Plan.id, after, limit)

    async def replace(self, spec: PlanSpec, actor: Actor) -> Plan:
        """Other limits under the same name: they act at the next request of every tenant that refers to it.

        Raises PlanNotFound.
        """
        async with self._epochs.change_where(Tenant.plan == spec.id) as session:
            row = await _find(session, spec.id, lock=True)
            before = describe(row)
            _apply(row, spec)
            await session.flush()
            audit.append(session, actor, Act("plan.update", "", spec.id, before, describe(row)))
        return row

    async def delete(self, plan_id: str, actor: Actor) -> None:
        """Raises PlanNotFound, PlanInUse."""
        try:
            async with self._database.begin() as session:
                row = await _find(session, plan_id, lock=True)
                await session.delete(row)
                await session.flush()
                audit.append(session, actor, Act("plan.delete", target=plan_id, before=describe(row)))
        except IntegrityError as error:
            raise PlanInUse(f"tenants refer to plan {plan_id!r}") from error


async def _find(session: AsyncSession, plan_id: str, lock: bool = False) -> Plan:
    row = await session.get(Plan, plan_id, with_for_update=lock or None)
    if row is None:
        raise PlanNotFound(f"plan {plan_id!r} does not exist")
    return row


def _apply(row: Plan, spec: PlanSpec) -> None:
    row.limits, row.model_limits = spec.limits.as_dict(), check_model_limits(spec.model_limits)
    row.adapter_limits = check_adapter_limits(spec.adapter_limits)


def effective(tenant: Tenant, plan: Plan | None) -> tuple[Limits, dict[str, Limits]]:
    """What holds for the tenant: its own limits over the plan's, for the whole and for single models."""
    limits, models = Limits.of(tenant.limits), model_limits_of(tenant.model_limits)
    if plan is None:
        return limits, models
    planned = model_limits_of(plan.model_limits)
    both = {name: models.get(name, Limits()).over(planned.get(name, Limits())) for name in {*models, *planned}}
    return limits.over(Limits.of(plan.limits)), both


def describe(row: Plan) -> dict[str, Any]:
    """The plan as the audit log keeps it."""
    limits, model_limits = asdict(Limits.of(row.limits)), described(row.model_limits)
    return {"id": row.id, "limits": limits, "model_limits": model_limits, "adapter_limits": row.adapter_limits}


def described(model_limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: asdict(limits) for name, limits in model_limits_of(model_limits).items()}
