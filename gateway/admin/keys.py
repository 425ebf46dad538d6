"""/admin/v1/tenants/{tenant}/keys: issue, import, rotate, list, read, revoke. A key is shown once, when
it is made."""

from __future__ import annotations

from collections.abc import Sequence
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
from gateway.auth import AdminPrincipal, caller_of, forbidden, requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.addresses import MAX_ADDRESSES
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
    allowed_ips: Annotated[list[str], Field(max_length=MAX_ADDRESSES)] | None = None

    def spec(self) -> KeySpec:
        return KeySpec(
            name=self.name, scopes=tuple(self.scopes), limits=self.limits.limits(),
            models=None if self.models is None else tuple(self.models),
            expires_at=moment(self.expires_at, "expires_at"),
            allowed_ips=None if self.allowed_ips is None else tuple(self.allowed_ips),
        )  # fmt: skip


class LegacyKey(NewKey):
    """A key that another gateway made: the SHA-256 of the whole key, in hex. `hint` is shown in lists."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    hint: Annotated[str, Field(max_length=8)] = ""


class Rotation(Body):
    """The old key ends after `overlap_s` seconds: a day, if nothing is said."""

    overlap_s: Annotated[float, Field(ge=0, le=90 * 86400)] = 86400.0


def check_grant(request: Request, scopes: Sequence[str]) -> None:
    """Nobody makes a key with more rights than their own: for any tenant acts only who is admin. Raises ApiError."""
    caller = caller_of(request)
    assert isinstance(caller, AdminPrincipal)
    if "act_as" in scopes and not caller.has_role("admin"):
        raise forbidden("Only an admin key with the role admin can give the scope `act_as`.")


@router.post("", status_code=201, openapi_extra=body_of(NewKey))
async def issue_key(request: Request, tenant: TenantId) -> dict[str, Any]:
    body = body_as(request, NewKey)
    check_grant(request, body.scopes)
    issued = await state_of(request).keys.issue(tenant, body.spec(), actor_of(request))
    return as_object(issued.row) | {"key": issued.key}


@router.post("/import", status_code=201, openapi_extra=body_of(LegacyKey))
async def import_key(request: Request, tenant: TenantId) -> dict[str, Any]:
    """A key of any form goes on working, from the SHA-256 that another gateway stored; 409 if it is known."""
    body = body_as(request, LegacyKey)
    check_grant(request, body.scopes)
    sha256 = bytes.fromhex(body.sha256)
    keys = state_of(request).keys
    return as_object(await keys.import_legacy(tenant, body.spec(), sha256, body.hint, actor_of(request)))


@router.post("/{key_id}/rotate", status_code=201, openapi_extra=body_of(Rotation))
async def rotate_key(request: Request, tenant: TenantId, key_id: KeyId) -> dict[str, Any]:
    """A new key with the same rights, shown now; the old one goes on for a while."""
    body, keys = body_as(request, Rotation), state_of(request).keys
    check_grant(request, (await keys.get(tenant, key_id)).scopes)
    issued = await keys.rotate(tenant, key_id, body.overlap_s, actor_of(request))
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
        "allowed_ips": row.allowed_ips,
        "legacy": row.is_legacy,
        "rotated_from": row.rotated_from,
        "last_used_at": unix(row.last_used_at),
        "created_at": unix(row.created_at),
        "expires_at": unix(row.expires_at),
        "revoked_at": unix(row.revoked_at),
    }
