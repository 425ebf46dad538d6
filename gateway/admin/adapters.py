"""Adapters: upload, replace, list, read, delete, through three doors with one route behind them.

/admin/v1/tenants/{tenant}/adapters   the admin, for one tenant
/admin/v1/adapters                    the admin, shared by all tenants
/v1/adapters                          a tenant's key with scope adapters:write, for itself
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from adapters.records import SHARED, Adapter, AdapterNotFound, NameTaken, Stored, Version
from adapters.spec import AdapterRef
from engine.protocol import EngineError
from gateway.admin.adapter_objects import as_object, in_full, last_used, quota_object, with_health
from gateway.admin.bodies import After, Limit, actor_of, page, tenant_id
from gateway.auth import AdminPrincipal, caller_of, requires, state_of
from gateway.intake import check_in
from gateway.probes import parse_probes
from gateway.state import State
from gateway.upload import check_length, in_time, receive

log = logging.getLogger(__name__)


async def owner_of(request: Request) -> str:
    """Whose adapters these are; the door has been checked before. Raises TenantNotFound."""
    caller = caller_of(request)
    if not isinstance(caller, AdminPrincipal):
        return caller.tenant_id
    tenant = request.path_params.get("tenant")
    return SHARED if tenant is None else (await state_of(request).directory.get(tenant_id(tenant))).id


Owner = Annotated[str, Depends(owner_of)]


PREFIXES: tuple[tuple[str, Any], ...] = (
    ("/admin/v1/tenants/{tenant}/adapters", requires("admin")),
    ("/admin/v1/adapters", requires("admin")),
    ("/v1/adapters", requires("adapters:write")),
)
"""The three doors, and who may come in."""


async def create_adapter(request: Request, owner: Owner, force: bool = False) -> JSONResponse:
    """`force`: its probes are kept, but not asked."""
    state = state_of(request)
    name, stored = await _take_in(request, owner, wants_name=True)
    stored = await state.prober.checked(owner, name or "", stored, [], force)
    adapter = await state.registry.register(owner, name or "", stored, actor_of(request))
    return answer(state, adapter, adapter.version(), 201)


async def replace_adapter(
    request: Request, owner: Owner, name: str, activate: bool = True, force: bool = False
) -> JSONResponse:
    """`force`: what becomes current is not asked the probes."""
    state = state_of(request)
    existing = await state.registry.get(owner, name)
    _, stored = await _take_in(request, owner, wants_name=False)
    if activate:
        stored = await state.prober.checked(owner, name, stored, existing.probes, force)
    adapter = await state.registry.replace(owner, name, stored, actor_of(request), activate)
    return answer(state, adapter, adapter.versions[-1])


async def list_adapters(request: Request, owner: Owner, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    state = state_of(request)
    found, has_more = await state.registry.page(owner, after, limit)
    used = await last_used(state, owner, found)
    rows = [await with_health(state, adapter) | used(adapter) for adapter in found]
    return page(rows, has_more) | {"quota": quota_object(await state.registry.use(owner))}


async def read_adapter(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    state = state_of(request)
    adapter = await state.registry.get(owner, name)
    used = await last_used(state, owner, [adapter])
    return await in_full(state, adapter) | used(adapter)


async def delete_adapter(request: Request, owner: Owner, name: str) -> JSONResponse:
    state = state_of(request)
    digests = await state.registry.retire(owner, name, actor_of(request))
    body = {"object": "adapter.deleted", "id": name, "deleted": True}
    return JSONResponse(body, background=BackgroundTask(evict, state, digests))


def _router(prefix: str, scope: Any) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["adapters"], dependencies=[Depends(scope)])
    router.add_api_route("", create_adapter, methods=["POST"], status_code=201)
    router.add_api_route("", list_adapters, methods=["GET"])
    router.add_api_route("/{name}", read_adapter, methods=["GET"])
    router.add_api_route("/{name}", replace_adapter, methods=["PUT"])
    router.add_api_route("/{name}", delete_adapter, methods=["DELETE"])
    return router


routers = tuple(_router(prefix, scope) for prefix, scope in PREFIXES)


async def _take_in(request: Request, owner: str, wants_name: bool) -> tuple[str | None, Stored]:
    """The body → checked and in the store, without a name yet. Nothing is left behind if it fails."""
    state = state_of(request)
    max_bytes = state.settings.max_upload
    num_bytes = check_length(request.headers, max_bytes)
    (await state.registry.use(owner)).check(int(wants_name), num_bytes)
    stage = await asyncio.to_thread(state.store.stage)
    try:
        kind = request.headers.get("content-type", "")
        async with state.uploads.body(owner):
            body = in_time(request.stream(), state.settings.request_timeout_s)
            received = await receive(body, kind, stage, max_bytes, wants_name)
        name, probes = received.name, None if received.probes is None else parse_probes(received.probes)
        if name is not None:
            await _check_free(state, owner, name)
        return name, replace(await check_in(state, stage), probes=probes)
    finally:
        await asyncio.shield(asyncio.to_thread(state.store.discard, stage))


async def _check_free(state: State, owner: str, name: str) -> None:
    """Spares the check of a body that can't be registered; register() decides."""
    state.registry.check_name(name)
    with suppress(AdapterNotFound):
        await state.registry.get(owner, name)
        raise NameTaken("adapter_exists", f"there is an adapter named {name}", "name")


def answer(state: State, adapter: Adapter, version: Version, status: int = 200) -> JSONResponse:
    """The version as it is now; if it answers requests, the engines are told to load it."""
    answering = {adapter.current, adapter.canary.version if adapter.canary else 0}
    task = BackgroundTask(warm, state, version.ref) if version.version in answering else None
    return JSONResponse(as_object(adapter, version), status, background=task)


async def warm(state: State, ref: AdapterRef) -> None:
    """Loads it before the first request asks; that engines are away is no fault of the upload."""
    try:
        await state.replicas.warm(ref)
    except EngineError as error:
        log.info("adapter %s will be loaded at its first use: %s", ref.digest[:12], error)


async def evict(state: State, digests: Iterable[str]) -> None:
    """Frees what nobody can ask for any more."""
    for digest in digests:
        try:
            await state.replicas.evict(digest)
        except EngineError as error:
            log.info("adapter %s stays loaded until its place is needed: %s", digest[:12], error)
