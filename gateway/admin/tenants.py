"""/admin/v1/tenants: create, list, read, change, delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from gateway.admin.adapters import evict
from gateway.admin.bodies import (
    AdapterLimitsBody,
    After,
    Body,
    Limit,
    LimitsBody,
    ModelLimitsBody,
    TenantId,
    actor_of,
    check_nulls,
    limits_object,
    model_limits,
    model_limits_object,
    page,
    unix,
)
from gateway.auth import requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.directory import TenantNotFound, TenantSpec
from tenants.limits import MAX_MODEL_LIMITS, Limits
from tenants.models import Tenant
from tenants.retention import MAX_HOURS, retention_of, seconds_of

router = APIRouter(prefix="/admin/v1/tenants", tags=["tenants"], dependencies=[Depends(requires("admin"))])

Name = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(gt=0, le=1000)]
Priority = Literal["interactive", "standard", "batch"]
UnknownFields = Literal["reject", "warn"]
Retention = Literal["none"] | Annotated[int, Field(ge=1, le=MAX_HOURS)] | None
Models = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=1000)] | None


ModelNames = Annotated[dict[str, str], Field(max_length=MAX_MODEL_LIMITS)]

ERASED = ("keys", "adapters", "responses", "conversations", "idempotent_answers", "kv_blocks")
KEPT = ("usage", "audit")
"""What becomes of a tenant's data when it is deleted (docs/data.md)."""


class NewTenant(Body):
    """Only `id` is required."""

    id: str
    name: Name | None = None
    weight: Weight = 1.0
    priority: Priority = "standard"
    models: Models = None
    limits: LimitsBody = LimitsBody()
    model_limits: ModelLimitsBody = {}
    adapter_limits: AdapterLimitsBody = AdapterLimitsBody()
    plan: str | None = None
    model_names: ModelNames = {}
    unknown_fields: UnknownFields = "reject"
    retention: Retention = None
    suspended: bool = False


class TenantChanges(Body):
    """What is not named stays as it is, inside `limits` too; `model_limits`, `adapter_limits` and `model_names` are
    replaced whole."""

    name: Name | None = None
    weight: Weight | None = None
    priority: Priority | None = None
    models: Models = None
    limits: LimitsBody | None = None
    model_limits: ModelLimitsBody | None = None
    adapter_limits: AdapterLimitsBody | None = None
    plan: str | None = None
    model_names: ModelNames | None = None
    unknown_fields: UnknownFields | None = None
    retention: Retention = None
    suspended: bool | None = None


@router.post("", status_code=201, openapi_extra=body_of(NewTenant))
async def create_tenant(request: Request) -> dict[str, Any]:
    body = body_as(request, NewTenant)
    spec = TenantSpec(
        id=body.id, name=body.name or "", weight=body.weight, priority=body.priority,
        models=None if body.models is None else tuple(body.models), limits=body.limits.limits(),
        model_limits=model_limits(body.model_limits), adapter_limits=body.adapter_limits.stated(), plan=body.plan,
        model_names=body.model_names,
        unknown_fields=body.unknown_fields, retention=body.retention, suspended=body.suspended,
    )  # fmt: skip
    return as_object(await state_of(request).directory.create(spec, actor_of(request)))


@router.get("")
async def list_tenants(request: Request, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    rows, has_more = await state_of(request).directory.page(after, limit)
    return page([as_object(row) for row in rows], has_more)


@router.get("/{tenant}")
async def read_tenant(request: Request, tenant: TenantId) -> dict[str, Any]:
    return as_object(await state_of(request).directory.get(tenant))


@router.patch("/{tenant}", openapi_extra=body_of(TenantChanges))
async def change_tenant(request: Request, tenant: TenantId) -> dict[str, Any]:
    body = body_as(request, TenantChanges)
    changes = {name: getattr(body, name) for name in body.model_fields_set}
    check_nulls(changes, may_be_null=("models", "plan", "retention"))
    if body.limits is not None:
        changes["limits"] = body.limits.model_dump(exclude_unset=True)
    if body.model_limits is not None:
        changes["model_limits"] = model_limits(body.model_limits)
    if body.adapter_limits is not None:
        changes["adapter_limits"] = body.adapter_limits.stated()
    state = state_of(request)
    row = await state.directory.patch(tenant, changes, actor_of(request))
    if "retention" in changes:
        await state.conversations.limit(tenant, seconds_of(row.retention_hours))
        await state.kv_owners.sync()
    return as_object(row)


@router.delete("/{tenant}")
async def delete_tenant(request: Request, tenant: TenantId) -> JSONResponse:
    """Its keys end with it, its adapters, responses and conversations; the usage ledger and the audit log stay. The
    answer states both."""
    state = state_of(request)
    try:
        await state.directory.delete(tenant, actor_of(request))
    except TenantNotFound:  # maybe it was deleted, and what follows did not come to its end
        await _erase(request, tenant)
        raise
    digests = await _erase(request, tenant)
    body = {"object": "tenant.deleted", "id": tenant, "deleted": True, "erased": ERASED, "kept": KEPT}
    return JSONResponse(body, background=BackgroundTask(evict, state, digests))


async def _erase(request: Request, tenant: str) -> list[str]:
    """→ the digests that were its own."""
    state = state_of(request)
    digests = await state.registry.retire_all(tenant, actor_of(request))
    await state.conversations.limit(tenant, 0)
    await state.kv_owners.sync()
    return digests


def as_object(row: Tenant) -> dict[str, Any]:
    limits = Limits.of(row.limits)
    return {
        "object": "tenant",
        "id": row.id,
        "name": row.name,
        "weight": row.weight,
        "priority": row.priority,
        "models": row.models,
        "limits": limits_object(limits),
        "model_limits": model_limits_object(row.model_limits),
        "adapter_limits": row.adapter_limits,
        "plan": row.plan,
        "model_names": row.model_names,
        "unknown_fields": row.unknown_fields,
        "retention": retention_of(row.retention_hours),
        "suspended": row.suspended,
        "created_at": unix(row.created_at),
    }
