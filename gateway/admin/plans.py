"""/admin/v1/plans: named sets of limits: create, list, read, replace, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from gateway.admin.bodies import (
    AdapterLimitsBody,
    After,
    Body,
    Limit,
    LimitsBody,
    ModelLimitsBody,
    actor_of,
    limits_object,
    model_limits,
    model_limits_object,
    page,
    unix,
)
from gateway.auth import requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.limits import NAME, Limits
from tenants.models import Plan
from tenants.plans import PlanNotFound, PlanSpec

router = APIRouter(prefix="/admin/v1/plans", tags=["plans"], dependencies=[Depends(requires("admin"))])


class PlanLimits(Body):
    """For the whole tenant, and for single models."""

    limits: LimitsBody = LimitsBody()
    model_limits: ModelLimitsBody = {}
    adapter_limits: AdapterLimitsBody = AdapterLimitsBody()

    def spec(self, plan_id: str) -> PlanSpec:
        return PlanSpec(plan_id, self.limits.limits(), model_limits(self.model_limits), self.adapter_limits.stated())


class NewPlan(PlanLimits):
    """Only `id` is required."""

    id: str


def plan_id(plan: str) -> str:
    """What can't be a plan's id is not looked up. Raises PlanNotFound."""
    if not NAME.fullmatch(plan):
        raise PlanNotFound(f"plan {plan[:64]!r} does not exist")
    return plan


PlanId = Annotated[str, Depends(plan_id)]


@router.post("", status_code=201, openapi_extra=body_of(NewPlan))
async def create_plan(request: Request) -> dict[str, Any]:
    body = body_as(request, NewPlan)
    return as_object(await state_of(request).plans.create(body.spec(body.id), actor_of(request)))


@router.get("")
async def list_plans(request: Request, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    rows, has_more = await state_of(request).plans.page(after, limit)
    return page([as_object(row) for row in rows], has_more)


@router.get("/{plan}")
async def read_plan(request: Request, plan: PlanId) -> dict[str, Any]:
    return as_object(await state_of(request).plans.get(plan))


@router.put("/{plan}", openapi_extra=body_of(PlanLimits))
async def replace_plan(request: Request, plan: PlanId) -> dict[str, Any]:
    """Acts at the next request of every tenant that refers to it."""
    return as_object(await state_of(request).plans.replace(body_as(request, PlanLimits).spec(plan), actor_of(request)))


@router.delete("/{plan}")
async def delete_plan(request: Request, plan: PlanId) -> dict[str, Any]:
    """409 while tenants refer to it."""
    await state_of(request).plans.delete(plan, actor_of(request))
    return {"object": "plan.deleted", "id": plan, "deleted": True}


def as_object(row: Plan) -> dict[str, Any]:
    return {
        "object": "plan",
        "id": row.id,
        "limits": limits_object(Limits.of(row.limits)),
        "model_limits": model_limits_object(row.model_limits),
        "adapter_limits": row.adapter_limits,
        "created_at": unix(row.created_at),
    }
