"""/admin/v1/tenants/{tenant}/keys: issue, list, read, revoke. A key is shown once, when it is made."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request

from gateway.admin.bodies import (
    After,
    Body,
    KeyId,
    Limit,
    LimitsBody,
    TenantId,
    actor_of,
    limits_object,
    moment,
    page,
    unix,
)
from gateway.admin.tenants import Models, Name
from gateway.auth import requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.keys import KeySpec
from tenants.limits import Limits
from tenants.models import ApiKey

router = APIRouter(prefix="/admin/v1/tenants/{tenant}/keys", tags=["keys"], dependencies=[Depends(requires("admin"))])


class NewKey(Body):
    """Only `name` is required."""

    name: Name
    scopes: Annotated[list[str], Field(max_length=16)] = Field(default_factory=lambda: ["inference"])
    limits: LimitsBody = LimitsBody()
    models: Models = None
    expires_at: int | str | None = None


@router.post("", status_code=201, openapi_extra=body_of(NewKey))
async def issue_key(request: Request, tenant: TenantId) -> dict[str, Any]:
    body = body_as(request, NewKey)
    spec = KeySpec(
        name=body.name, scopes=tuple(body.scopes), limits=body.limits.limits(),
        models=None if body.models is None else tuple(body.models), expires_at=moment(body.expires_at, "expires_at"),
    )  # fmt: skip
    issued = await state_of(request).keys.issue(tenant, spec, actor_of(request))
    return as_object(issued.row) | {"key": issued.key}


@router.get("")
async def list_keys(request: Request, tenant: TenantId, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    state = state_of(request)
    await state.directory.get(tenant)
    rows, has_more = await state.keys.page(tenant, after, limit)
    return page([as_object(row) for row in rows], has_more)


@router.get("/{key_id}")
async def read_key(request: Request, tenant: TenantId, key_id: KeyId) -> dict[str, Any]:
    return as_object(await state_of(request).keys.get(tenant, key_id))


@router.delete("/{key_id}")
async def revoke_key(request: Request, tenant: TenantId, key_id: KeyId) -> dict[str, Any]:
    """From the next request on, on every worker, the key is unknown."""
    await state_of(request).keys.revoke(tenant, key_id, actor_of(request))
    return {"object": "api_key.deleted", "id": key_id, "deleted": True}


def as_object(row: ApiKey) -> dict[str, Any]:
    return {
        "object": "api_key",
        "id": row.id,
        "tenant": row.tenant_id,
        "name": row.name,
        "hint": row.hint,
        "scopes": row.scopes,
        "models": row.models,
        "limits": limits_object(Limits.of(row.limits)),
        "created_at": unix(row.created_at),
        "expires_at": unix(row.expires_at),
        "revoked_at": unix(row.revoked_at),
    }
