"""/admin/v1/admin-keys: keys of administrators, with roles; and switching the key of the settings off and on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from starlette.requests import Request

from gateway.admin.bodies import After, Body, KeyId, Limit, actor_of, moment, page, unix
from gateway.admin.tenants import Name
from gateway.auth import AdminPrincipal, requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.admin_keys import SETTINGS_KEY, AdminKeySpec
from tenants.models import AdminKey

router = APIRouter(prefix="/admin/v1/admin-keys", tags=["admin keys"])
Admin = Annotated[AdminPrincipal, Depends(requires("admin:keys"))]


class NewAdminKey(Body):
    """`role` says what it may do."""

    name: Name
    role: Literal["viewer", "operator", "admin"]
    expires_at: int | str | None = None


@router.post("", status_code=201, openapi_extra=body_of(NewAdminKey))
async def create_admin_key(request: Request, _: Admin) -> dict[str, Any]:
    body = body_as(request, NewAdminKey)
    spec = AdminKeySpec(body.name, body.role, moment(body.expires_at, "expires_at"))
    row, key = await state_of(request).admin_keys.create(spec, actor_of(request))
    return as_object(row) | {"key": key}


@router.get("")
async def list_admin_keys(request: Request, _: Admin, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    rows, has_more = await state_of(request).admin_keys.page(after, limit)
    return page([as_object(row) for row in rows], has_more)


@router.delete("/{key_id}")
async def revoke_admin_key(request: Request, caller: Admin, key_id: KeyId) -> dict[str, Any]:
    """Unknown from the next request on. `settings` is the key of the settings. 409 for one's own."""
    await state_of(request).admin_keys.revoke(key_id, caller.administrator, actor_of(request))
    return {"object": "admin_key.deleted", "id": key_id, "deleted": True}


@router.post("/settings/restore")
async def restore_settings_key(request: Request, _: Admin) -> dict[str, Any]:
    """The key of the settings counts again."""
    await state_of(request).admin_keys.restore_settings_key(actor_of(request))
    return {"object": "admin_key", "id": SETTINGS_KEY, "revoked_at": None}


def as_object(row: AdminKey) -> dict[str, Any]:
    return {
        "object": "admin_key",
        "id": row.id,
        "name": row.name,
        "role": row.role,
        "hint": row.hint,
        "created_at": unix(row.created_at),
        "expires_at": unix(row.expires_at),
        "revoked_at": unix(row.revoked_at),
    }
