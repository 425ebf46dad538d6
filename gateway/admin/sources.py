"""/admin/v1/sources: what is watched, when it was looked at last, what came of each adapter in it; and a look now."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request

from adapters.source_book import Key, Outcome, SourceBook, source_id
from gateway.admin.bodies import Limit, actor_of, page, unix
from gateway.auth import requires, state_of
from gateway.errors import not_found
from gateway.sources import ask_for_look, last_look
from gateway.state import State
from tenants import audit
from tenants.audit import Act

router = APIRouter(prefix="/admin/v1/sources", tags=["sources"], dependencies=[Depends(requires("admin"))])
AfterKey = Annotated[
    str | None, Query(pattern=r"^[^/]{1,64}/[^/]{1,200}$", description="tenant/name of the last one seen.")
]


@router.get("")
async def list_sources(request: Request) -> dict[str, Any]:
    """Every source of the settings, in their order."""
    state = state_of(request)
    return page([await _source(state, place) for place in state.settings.adapter_sources], False)


@router.get("/{source}/adapters")
async def list_source_adapters(
    request: Request, source: str, status: Literal["ready", "failed"] | None = None, limit: Limit = 100,
    after: AfterKey = None,
) -> dict[str, Any]:  # fmt: skip
    """What was found in one source, by tenant and name."""
    state = state_of(request)
    _place(state, source)
    last = None if after is None else Key(*after.split("/", 1))
    is_failed = None if status is None else status == "failed"
    rows, has_more = await SourceBook(state.database).page(source, last, limit, is_failed)
    return page([_adapter(key, outcome) for key, outcome in rows], has_more)


@router.post("/{source}/sync", status_code=202)
async def sync(request: Request, source: str) -> dict[str, Any]:
    """Has it looked at now: what changed is taken within seconds. Done when `synced` is at least `asked`."""
    state = state_of(request)
    place = _place(state, source)
    asked = await ask_for_look(state.redis, place)
    async with state.database.begin() as session:
        audit.append(
            session, actor_of(request), Act("source.sync", target=source, after={"place": place, "asked": asked})
        )
    return await _source(state, place) | {"asked": asked}


def _place(state: State, source: str) -> str:
    for place in state.settings.adapter_sources:
        if source_id(place) == source:
            return place
    raise not_found("There is no such source.", "source", "source_not_found")


async def _source(state: State, place: str) -> dict[str, Any]:
    last = await last_look(state.redis, place)
    counts = await SourceBook(state.database).counts(source_id(place))
    return {
        "object": "source",
        "id": source_id(place),
        "place": place,
        "every_s": state.settings.source_every_s,
        "status": "pending" if not last else "failed" if last["error"] else "ok",
        "error": last.get("error"),
        "looked_at": last.get("at"),
        "ready": counts["ready"],
        "failed": counts["failed"],
        "waiting": last.get("waiting", 0),
        "synced": last.get("asked", 0),
    }


def _adapter(key: Key, outcome: Outcome) -> dict[str, Any]:
    return {
        "object": "source.adapter",
        "id": f"{key.tenant}/{key.name}",
        "tenant": key.tenant,
        "name": key.name,
        "status": "failed" if outcome.code else "ready",
        "digest": f"sha256:{outcome.digest}" if outcome.digest else None,
        "code": outcome.code or None,
        "message": outcome.message or None,
        "param": outcome.param,
        "at": None if outcome.at is None else unix(outcome.at),
    }
