"""/admin/v1/audit: what administrators did, newest first, by who, what, to whom and when."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request

from gateway.admin.bodies import Period, page, unix
from gateway.auth import requires, state_of
from tenants.audit import AuditQuery
from tenants.models import AuditEntry

router = APIRouter(prefix="/admin/v1/audit", tags=["audit"], dependencies=[Depends(requires("admin"))])
Text = Annotated[str | None, Field(max_length=512)]


class AuditFilters(Period):
    """Equal in all that is given. `tenant=` (empty): what concerns no single one."""

    tenant: Text = None
    actor: Text = None
    action: Text = None
    target: Text = None
    request_id: Text = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    after: Annotated[int | None, Field(ge=1, le=2**62)] = None


@router.get("")
async def list_audit(request: Request, wanted: Annotated[AuditFilters, Query()]) -> dict[str, Any]:
    query = AuditQuery(wanted.actor, wanted.action, wanted.target, wanted.request_id, *wanted.moments())
    rows = await state_of(request).audit.page(wanted.tenant, wanted.after, wanted.limit + 1, query)
    return page([as_object(row) for row in rows[: wanted.limit]], len(rows) > wanted.limit)


def as_object(row: AuditEntry) -> dict[str, Any]:
    return {
        "object": "audit.entry",
        "id": str(row.id),
        "at": unix(row.at),
        "actor": row.actor,
        "action": row.action,
        "tenant": row.tenant_id,
        "target": row.target,
        "before": row.before,
        "after": row.after,
        "request_id": row.request_id,
    }
