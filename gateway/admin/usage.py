"""/admin/v1/usage: sums of the usage ledger."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request

from gateway.admin.bodies import moment
from gateway.auth import requires, state_of
from gateway.errors import bad_request
from tenants.limits import NAME
from tenants.usage import Group, UsageQuery

router = APIRouter(prefix="/admin/v1/usage", tags=["usage"], dependencies=[Depends(requires("admin"))])

Id = Annotated[str | None, Query(pattern=f"^{NAME.pattern}$")]
Time = Annotated[str | None, Query(max_length=64, description="Seconds since 1970, or ISO 8601 with a time zone.")]


@router.get("")
async def read_usage(
    request: Request, tenant: Id = None, key: Id = None, start: Time = None, end: Time = None, group_by: str = ""
) -> dict[str, Any]:
    """Attempts that began from `start` until before `end`, one row per group."""
    query = UsageQuery(tenant, key, _moment(start, "start"), _moment(end, "end"))
    groups = _groups(group_by)
    sums = await state_of(request).ledger.sums(query, groups)
    data = [
        {
            "object": "usage",
            **found.group,
            "num_requests": found.attempts,
            "prompt_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens,
            "completion_tokens": found.completion_tokens,
            "total_tokens": found.prompt_tokens + found.completion_tokens,
        }
        for found in sums
    ]
    return {"object": "list", "data": data, "has_more": False}


def _groups(text: str) -> list[Group]:
    known = get_args(Group)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names) or any(name not in known for name in names):
        raise bad_request(f"'group_by' must name different ones of {', '.join(known)}.", "group_by")
    return [name for name in known if name in names]


def _moment(value: str | None, param: str) -> Any:
    return moment(int(value) if value and value.isdecimal() and value.isascii() else value, param)
