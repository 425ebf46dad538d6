"""/admin/v1/audit: what administrators did, newest first, by who, what, to whom and when."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request

from gateway.admin.bodies import Limit, moment, page, unix
from gateway.admin.usage import Time
from gateway.auth import requires, state_of
from tenants.audit import AuditQuery
from tenants.models import AuditEntry

router = APIRouter(prefix="/admin/v1/audit", tags=["audit"], dependencies=[Depends(requires("admin"))])
Text = Annotated[str | None, Query(max_length=512)]


@router.get("")
async def list_audit(
    request: Request, tenant: Text = None, actor: Text = None, action: Text = None, target: Text = None,
    request_id: Text = None, start: Time = None, end: Time = None, limit: Limit = 100,
    after: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> dict[str, Any]:  # fmt: skip
    """Equal in all that is given, from `start` until before `end`. `tenant=` (empty): what concerns no single one."""
    wanted = AuditQuery(actor, action, target, request_id, _time(start, "start"), _time(end, "end"))
    rows = await state_of(request).audit.page(tenant, after, limit + 1, wanted)
    return page([as_object(row) for row in rows[:limit]], len(rows) > limit)


def _time(value: str | None, param: str) -> Any:
    return moment(int(value) if value and value.isdecimal() and value.isascii() else value, param)


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
