"""/admin/v1/tenants/{tenant}/keys: issue, import, rotate, list, read, change, revoke. A key is shown once,
when it is made."""

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
    check_nulls,
    limits_object,
    moment,
    page,
    unix,
)
from gateway.admin.tenants import Models, Name
from gateway.auth import requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from tenants.addresses import MAX_ADDRESSES
from tenants.keys import KeySpec
from tenants.limits import Limits
from tenants.models import ApiKey

router = APIRouter(prefix="/admin/v1/tenants/{tenant}/keys", tags=["keys"], dependencies=[Depends(requires("admin"))])


Scopes = Annotated[list[str], Field(max_length=16)]
Addresses = Annotated[list[str], Field(max_length=MAX_ADDRESSES)] | None


class NewKey(Body):
    """Only `name` is required."""

    name: Name
    scopes: Scopes = Field(default_factory=lambda: ["inference"])
    limits: LimitsBody = LimitsBody()
    models: Models = None
    expires_at: int | str | None = None
    allowed_ips: Addresses = None

    def spec(self) -> KeySpec:
        return KeySpec(
            name=self.name, scopes=tuple(self.scopes), limits=self.limits.limits(),
            models=None if self.models is None else tuple(self.models),
            expires_at=moment(self.expires_at, "expires_at"),
            allowed_ips=None if self.allowed_ips is None else tuple(self.allowed_ips),
        )  # fmt: skip


class KeyChanges(Body):
    """What is not named stays as it is, inside `limits` too."""

    name: Name | None = None
    scopes: Scopes | None = None
    limits: LimitsBody | None = None
    models: Models = None
    expires_at: int | str | None = None
    allowed_ips: Addresses = None


class LegacyKey(NewKey):
    """A key that another gateway made: the SHA-256 of the whole key, in hex. `hint` is shown in lists."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    hint: Annotated[str, Field(max_length=8)] = ""


class Rotation(Body):
    """The old key ends after `overlap_s` seconds: a day, if nothing is said."""

    overlap_s: Annotated[float, Field(ge=0, le=90 * 86400)] = 86400.0


@router.post("", status_code=201, openapi_extra=body_of(NewKey))
async def issue_key(request: Request, tenant: TenantId) -> dict[str, Any]:
    body = body_as(request, NewKey)
    issued = await state_of(request).keys.issue(tenant, body.spec(), actor_of(request))
    return as_object(issued.row) | {"key": issued.key}


@router.post("/import", status_code=201, openapi_extra=body_of(LegacyKey))
async def import_key(request: Request, tenant: TenantId) -> dict[str, Any]:
    """A key of any form goes on working, from the SHA-256 that another gateway stored; 409 if it is known."""
    body = body_as(request, LegacyKey)
    sha256 = bytes.fromhex(body.sha256)
    keys = state_of(request).keys
    return as_object(await keys.import_legacy(tenant, body.spec(), sha256, body.hint, actor_of(request)))


@router.post("/{key_id}/rotate", status_code=201, openapi_extra=body_of(Rotation))
async def rotate_key(request: Request, tenant: TenantId, key_id: KeyId) -> dict[str, Any]:
    """A new key with the same rights, shown now; the old one goes on for a while."""
    body, keys = body_as(request, Rotation), state_of(request).keys
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


@router.patch("/{key_id}", openapi_extra=body_of(KeyChanges))
async def change_key(request: Request, tenant: TenantId, key_id: KeyId) -> dict[str, Any]:
    """What is named changes, at the next request on every worker; the rest stays, inside `limits` too."""
    body = body_as(request, KeyChanges)
    changes = {name: getattr(body, name) for name in body.model_fields_set}
    check_nulls(changes, may_be_null=("models", "expires_at", "allowed_ips"))
    if body.limits is not None:
        changes["limits"] = body.limits.model_dump(exclude_unset=True)
    for name in ("scopes", "models", "allowed_ips"):
        if changes.get(name) is not None:
            changes[name] = tuple(changes[name])
    if "expires_at" in changes:
        changes["expires_at"] = moment(body.expires_at, "expires_at")
    return as_object(await state_of(request).keys.patch(tenant, key_id, changes, actor_of(request)))


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
