"""…/adapters/{name}/pin: keep an adapter in the engines' memory. For the admin alone: what is pinned, others lack."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from gateway.admin.adapters import Owner
from gateway.admin.bodies import actor_of
from gateway.auth import requires, state_of
from gateway.errors import ApiError
from gateway.pins import PinsFull
from tenants import audit
from tenants.audit import Act


async def pin_adapter(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    """Pins the current version; after a replacement, the new one."""
    state = state_of(request)
    adapter = await state.registry.get(owner, name)
    try:
        is_new = await state.pins.add(adapter)
    except PinsFull:
        limit = state.replicas.ready().pin_memory_bytes
        message = f"Pinned adapters may take {limit} bytes, so that the largest allowed one can still be loaded."
        raise ApiError(409, message, code="pins_exhausted", headers={"x-should-retry": "false"}) from None
    return await _done(request, owner, name, was_pinned=not is_new, is_pinned=True)


async def unpin_adapter(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    """Lets it go when its place is needed. One that is not pinned stays so."""
    state = state_of(request)
    await state.registry.get(owner, name)
    was_pinned = await state.pins.remove(owner, name)
    return await _done(request, owner, name, was_pinned=was_pinned, is_pinned=False)


async def _done(request: Request, owner: str, name: str, was_pinned: bool, is_pinned: bool) -> dict[str, Any]:
    action = "adapter.pin" if is_pinned else "adapter.unpin"
    act = Act(action, owner, name, {"pinned": was_pinned}, {"pinned": is_pinned})
    async with state_of(request).database.begin() as session:
        audit.append(session, actor_of(request), act)
    return {"object": "adapter.pin", "id": name, "tenant": owner or None, "pinned": is_pinned}


def _router(prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["adapters"], dependencies=[Depends(requires("admin"))])
    router.add_api_route("/{name}/pin", pin_adapter, methods=["POST"])
    router.add_api_route("/{name}/pin", unpin_adapter, methods=["DELETE"])
    return router


routers = (_router("/admin/v1/tenants/{tenant}/adapters"), _router("/admin/v1/adapters"))
