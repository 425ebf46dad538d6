"""The usage ledger over HTTP: sums, single entries, corrections, export for the admin; a tenant's own sums."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import orjson
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.admin.bodies import Body, Period, actor_of, page
from gateway.auth import requires, state_of
from gateway.bodies import body_as
from gateway.errors import bad_request, not_found
from gateway.openai import body_of
from gateway.state import State
from tenants.keys import Principal
from tenants.limits import NAME
from tenants.models import UsageEntry
from tenants.usage import Group, Tokens, UsageQuery

router = APIRouter(prefix="/admin/v1/usage", tags=["usage"], dependencies=[Depends(requires("admin"))])
own_router = APIRouter(prefix="/v1/usage", tags=["usage"])

Id = Annotated[str | None, Field(pattern=f"^{NAME.pattern}$")]
Count = Annotated[int, Field(ge=-(10**12), le=10**12)]
EXPORT_PAGE = 1000
COLUMNS = (
    "id", "created_at", "tenant", "key", "model", "adapter", "adapter_version", "endpoint", "status", "prompt_tokens",
    "cached_tokens", "completion_tokens", "queue_s", "first_token_s", "total_s", "user", "metadata", "request_id",
)  # fmt: skip


class OwnSums(Period):
    """Attempts that began from `start` until before `end`, one row per group."""

    key: Id = None
    group_by: str = ""

    def query(self, tenant: str | None) -> UsageQuery:
        """Raises ApiError."""
        return UsageQuery(tenant, self.key, *self.moments())


class Sums(OwnSums):
    tenant: Id = None


class Entries(Period):
    tenant: Id = None
    key: Id = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    after: Annotated[str | None, Field(max_length=64, description="The id of the last one seen.")] = None


class Correction(Body):
    """What an entry has too much (negative) or too little, and why."""

    attempt: Annotated[str, Field(min_length=1, max_length=64)]
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    reason: Annotated[str, Field(min_length=1, max_length=512)]


@router.get("", response_model=dict[str, Any])
async def read_usage(request: Request, wanted: Annotated[Sums, Query()]) -> Response:
    """Attempts that began from `start` until before `end`, one row per group."""
    return await _sums(state_of(request), wanted.query(wanted.tenant), _groups(wanted.group_by))


@own_router.get("", response_model=dict[str, Any])
async def read_own_usage(
    request: Request, wanted: Annotated[OwnSums, Query()], principal: Principal = Depends(requires("tenant"))
) -> Response:
    """The same, of the caller's tenant alone."""
    return await _sums(state_of(request), wanted.query(principal.tenant_id), _groups(wanted.group_by))


@router.get("/entries")
async def list_entries(request: Request, wanted: Annotated[Entries, Query()]) -> dict[str, Any]:
    """Single attempts and corrections, newest first."""
    ledger = state_of(request).ledger
    last = None if wanted.after is None else await ledger.get(wanted.after)
    if wanted.after is not None and last is None:
        raise bad_request("'after' is not the id of an entry.", "after")
    query = UsageQuery(wanted.tenant, wanted.key, *wanted.moments())
    before = None if last is None else (last.created_at, last.attempt_id)
    rows, has_more = await ledger.page(query, before, wanted.limit)
    return page([as_object(row) for row in rows], has_more)


@router.post("/corrections", status_code=201, openapi_extra=body_of(Correction))
async def correct_usage(request: Request) -> dict[str, Any]:
    """A further entry beside the one named: the ledger itself never changes. 404 if there is no such attempt."""
    body = body_as(request, Correction)
    tokens = Tokens(body.prompt_tokens, body.cached_tokens, body.completion_tokens)
    row = await state_of(request).ledger.correct(body.attempt, tokens, body.reason, actor_of(request))
    if row is None:
        raise not_found(f"There is no attempt {body.attempt!r}.", "attempt", "attempt_not_found")
    return as_object(row)


@router.get("/export")
async def export_usage(
    request: Request,
    month: Annotated[str, Query(pattern=r"^\d{4}-\d{2}$", description="such as 2026-11, in UTC")],
    format: Literal["csv", "jsonl"] = "jsonl",
    tenant: Annotated[str | None, Query(pattern=f"^{NAME.pattern}$")] = None,
) -> StreamingResponse:
    """Every entry of a month, newest first, as it is read."""
    start, end = month_of(month)
    lines = _lines(state_of(request), UsageQuery(tenant, None, start, end), format)
    kind = "text/csv; charset=utf-8" if format == "csv" else "application/jsonl"
    name = f"usage-{month}.{format}"
    return StreamingResponse(lines, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


async def _lines(state: State, query: UsageQuery, kind: str) -> AsyncIterator[bytes]:
    """No session is open while the client reads."""
    if kind == "csv":
        yield _csv([COLUMNS])
    last: tuple[datetime, str] | None = None
    has_more = True
    while has_more:
        rows, has_more = await state.ledger.page(query, last, EXPORT_PAGE)
        found = [as_object(row) for row in rows]
        if kind == "csv":
            yield _csv([[_cell(row[name]) for name in COLUMNS] for row in found])
        else:
            yield b"".join(orjson.dumps({name: row[name] for name in COLUMNS}) + b"\n" for row in found)
        last = (rows[-1].created_at, rows[-1].attempt_id) if rows else None


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """What a spreadsheet would take for a formula is text."""
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


async def _sums(state: State, query: UsageQuery, groups: list[Group]) -> Response:
    """Written here: FastAPI would look at every number of tens of thousands of rows."""
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
        for found in await state.ledger.sums(query, groups)
    ]
    body = orjson.dumps({"object": "list", "data": data, "has_more": False})
    return Response(body, media_type="application/json")


def as_object(row: UsageEntry) -> dict[str, Any]:
    """One entry; times are seconds since the request arrived."""
    return {
        "object": "usage.entry", "id": row.attempt_id, "created_at": row.created_at.astimezone(UTC).isoformat(),
        "tenant": row.tenant_id, "key": row.key_id, "model": row.model, "adapter": row.adapter,
        "adapter_version": row.adapter_version, "endpoint": row.endpoint, "status": row.status,
        "prompt_tokens": row.prompt_tokens, "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens, "queue_s": row.queue_s, "first_token_s": row.first_token_s,
        "total_s": row.total_s, "user": row.user, "metadata": row.tags, "request_id": row.request_id,
    }  # fmt: skip


def month_of(text: str) -> tuple[datetime, datetime]:
    """Its first moment, and that of the next. Raises ApiError."""
    year, month = (int(part) for part in text.split("-"))
    if not re.fullmatch(r"\d{4}-\d{2}", text) or not 1 <= month <= 12 or not 1 <= year < 9999:
        raise bad_request("'month' must be a year and a month, such as 2026-11.", "month")
    following = (year, month + 1) if month < 12 else (year + 1, 1)
    return datetime(year, month, 1, tzinfo=UTC), datetime(*following, 1, tzinfo=UTC)


def _groups(text: str) -> list[Group]:
    known = get_args(Group)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names) or any(name not in known for name in names):
        raise bad_request(f"'group_by' must name different ones of {', '.join(known)}.", "group_by")
    return [name for name in known if name in names]
