"""What all admin routes share: strict bodies, pages, who acts, and when. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from gateway.auth import AdminPrincipal, caller_of
from gateway.errors import bad_request
from tenants.adapter_limits import MAX_ADAPTER_LIMIT
from tenants.audit import Actor
from tenants.directory import TenantNotFound
from tenants.keys import KeyNotFound
from tenants.limits import MAX_LIMIT, MAX_MODEL_LIMITS, NAME, NUMBERS, Limits, model_limits_of

Limit = Annotated[int, Query(ge=1, le=1000, description="How many to list at most.")]
After = Annotated[str | None, Query(pattern=r"^[\x21-\x7e]{1,128}$", description="The id of the last one seen.")]
LimitNumber = Annotated[int, Field(ge=0, le=MAX_LIMIT)] | None
AdapterLimitNumber = Annotated[int, Field(ge=0, le=MAX_ADAPTER_LIMIT)] | None

Time = Annotated[str | None, Field(max_length=64, description="Seconds since 1970, or ISO 8601 with a time zone.")]


class Body(BaseModel):
    """A JSON body: exact types, no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LimitsBody(Body):
    """null = unlimited, 0 = nothing. `soft` and `shadow` name limits that let everything through."""

    requests_per_minute: LimitNumber = None
    tokens_per_minute: LimitNumber = None
    concurrency: LimitNumber = None
    tokens_per_day: LimitNumber = None
    tokens_per_month: LimitNumber = None
    soft: Annotated[list[str], Field(max_length=8)] = []
    shadow: Annotated[list[str], Field(max_length=8)] = []

    def limits(self) -> Limits:
        return Limits.of(self.model_dump())


class AdapterLimitsBody(Body):
    """How many adapters, and bytes of them: null = unlimited, 0 = nothing; what is not named, the plan or the settings
    decide."""

    count: AdapterLimitNumber = None
    bytes: AdapterLimitNumber = None

    def stated(self) -> dict[str, int | None]:
        return self.model_dump(exclude_unset=True)


ModelLimitsBody = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=256)], LimitsBody], Field(max_length=MAX_MODEL_LIMITS)
]
"""By the name of a model, without a version."""


def model_limits(bodies: Mapping[str, LimitsBody]) -> dict[str, Limits]:
    return {name: body.limits() for name, body in bodies.items()}


def check_nulls(changes: Mapping[str, Any], may_be_null: Sequence[str]) -> None:
    """Raises ApiError for a null where it says nothing."""
    for name, value in changes.items():
        if value is None and name not in may_be_null:
            raise bad_request(f"'{name}' must not be null.", name)


def limits_object(limits: Limits) -> dict[str, Any]:
    return {**{name: getattr(limits, name) for name in NUMBERS}, "soft": limits.soft, "shadow": limits.shadow}


def model_limits_object(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: limits_object(limits) for name, limits in model_limits_of(stored).items()}


class Filters(BaseModel):
    """The query of a list. A name that is none of these is refused: misspelt, it would list everything."""

    model_config = ConfigDict(extra="forbid")


class Period(Filters):
    """From `start` until before `end`."""

    start: Time = None
    end: Time = None

    def moments(self) -> tuple[datetime | None, datetime | None]:
        """Raises ApiError."""
        return moment(_number(self.start), "start"), moment(_number(self.end), "end")


def page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A list as OpenAI writes it; the next page begins `after` its last_id."""
    ids = [str(entry["id"]) for entry in data]
    return {
        "object": "list", "data": list(data), "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }  # fmt: skip


def actor_of(request: Request) -> Actor:
    """Who acts, for the audit log: the admin, or a tenant's key by its public id."""
    caller, request_id = caller_of(request), request.scope.get("chorus.request_id", "")
    if isinstance(caller, AdminPrincipal):
        return Actor(caller.actor, request_id, is_admin=caller.has_role("admin"))
    return Actor(f"key:{caller.key_id}", request_id)


def tenant_id(tenant: str) -> str:
    """What can't be a tenant's id is not looked up. Raises TenantNotFound."""
    if not NAME.fullmatch(tenant):
        raise TenantNotFound(f"tenant {tenant[:64]!r} does not exist")
    return tenant


def _key_id(key_id: str) -> str:
    if not NAME.fullmatch(key_id):
        raise KeyNotFound(f"there is no key {key_id[:64]!r}")
    return key_id


TenantId = Annotated[str, Depends(tenant_id)]
KeyId = Annotated[str, Depends(_key_id)]


def unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _number(text: str | None) -> int | str | None:
    """What a query says in digits is a number."""
    return int(text) if text and text.isdecimal() and text.isascii() else text


def moment(value: int | str | None, param: str) -> datetime | None:
    """Seconds since 1970, or ISO 8601 with a time zone."""
    try:
        if value is None:
            return None
        if isinstance(value, int):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value)
    except (ValueError, OverflowError, OSError):
        raise bad_request(f"'{param}' is neither seconds since 1970 nor ISO 8601.", param) from None
    if found.tzinfo is None:
        raise bad_request(f"'{param}' needs a time zone.", param)
    return found.astimezone(UTC)
