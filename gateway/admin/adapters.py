"""Adapters: upload, replace, activate, list, delete, through three doors with one route behind them.

/admin/v1/tenants/{tenant}/adapters   the admin, for one tenant
/admin/v1/adapters                    the admin, shared by all tenants
/v1/adapters                          a tenant's key with scope adapters:write, for itself
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from adapters.registry import SHARED, Adapter, AdapterNotFound, NameTaken, Stored, Version
from adapters.spec import AdapterError, AdapterRef, AdapterSpec, AdapterTooLarge
from adapters.validation import Limits, describe, validate_in_subprocess
from engine.protocol import EngineError
from gateway.admin.bodies import After, Body, Limit, actor_of, page, tenant_id, unix
from gateway.auth import AdminPrincipal, caller_of, requires, state_of
from gateway.bodies import body_as
from gateway.openai import body_of
from gateway.state import State
from gateway.upload import check_length, in_time, receive
from tenants.directory import TenantNotFound

log = logging.getLogger(__name__)


class Activation(Body):
    """`if_current`: only if this version is the current one."""

    version: Annotated[int, Field(ge=1)]
    if_current: Annotated[int, Field(ge=1)] | None = None


async def owner_of(request: Request) -> str:
    """Whose adapters these are; the door has been checked before. Raises TenantNotFound."""
    caller = caller_of(request)
    if not isinstance(caller, AdminPrincipal):
        return caller.tenant_id
    tenant = request.path_params.get("tenant")
    return SHARED if tenant is None else (await state_of(request).directory.get(tenant_id(tenant))).id


Owner = Annotated[str, Depends(owner_of)]


async def create_adapter(request: Request, owner: Owner) -> JSONResponse:
    state = state_of(request)
    name, stored = await _take_in(request, owner, wants_name=True)
    adapter = await state.registry.register(owner, name or "", stored, actor_of(request))
    if owner != SHARED:
        await _withdraw_if_orphaned(request, owner, adapter)
    return _answer(state, adapter, adapter.version(), 201)


async def replace_adapter(request: Request, owner: Owner, name: str, activate: bool = True) -> JSONResponse:
    state = state_of(request)
    await state.registry.get(owner, name)
    _, stored = await _take_in(request, owner, wants_name=False)
    adapter = await state.registry.replace(owner, name, stored, actor_of(request), activate)
    return _answer(state, adapter, adapter.versions[-1])


async def activate_version(request: Request, owner: Owner, name: str) -> JSONResponse:
    body = body_as(request, Activation)
    state = state_of(request)
    adapter = await state.registry.activate(owner, name, body.version, actor_of(request), body.if_current)
    return _answer(state, adapter, adapter.version())


async def list_adapters(request: Request, owner: Owner, limit: Limit = 100, after: After = None) -> dict[str, Any]:
    found, has_more = await state_of(request).registry.page(owner, after, limit)
    return page([await _with_health(request, adapter) for adapter in found], has_more)


async def read_adapter(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    state = state_of(request)
    adapter = await state.registry.get(owner, name)
    versions = [
        _version_object(version)
        | {"is_current": version.version == adapter.current, "resident": _residency(state, version.digest)}
        for version in adapter.versions
    ]
    scales = await asyncio.to_thread(_scales, state, adapter.version().digest)
    return await _with_health(request, adapter) | scales | {"versions": versions}


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
    router.add_api_route("/{name}/activate", activate_version, methods=["POST"], openapi_extra=body_of(Activation))
    return router


routers = (
    _router("/admin/v1/tenants/{tenant}/adapters", requires("admin")),
    _router("/admin/v1/adapters", requires("admin")),
    _router("/v1/adapters", requires("adapters:write")),
)


async def _take_in(request: Request, owner: str, wants_name: bool) -> tuple[str | None, Stored]:
    """The body → checked and in the store, without a name yet. Nothing is left behind if it fails."""
    state = state_of(request)
    max_bytes = state.settings.max_upload
    check_length(request.headers, max_bytes)
    stage = await asyncio.to_thread(state.store.stage)
    try:
        kind = request.headers.get("content-type", "")
        async with state.uploads.body(owner):
            body = in_time(request.stream(), state.settings.request_timeout_s)
            name = await receive(body, kind, stage, max_bytes, wants_name)
        if name is not None:
            await _check_free(state, owner, name)
        limits = Limits(max_rank=state.settings.max_lora_rank, max_bytes=max_bytes)
        async with state.uploads.checks:
            spec = await validate_in_subprocess(stage, state.shape, limits)
        _check_memory(state, spec)
        size_bytes = await asyncio.to_thread(_size, stage)
        digest = await asyncio.to_thread(state.store.commit, stage)
    finally:
        await asyncio.shield(asyncio.to_thread(state.store.discard, stage))
    return name, Stored(digest, spec, size_bytes)


def _check_memory(state: State, spec: AdapterSpec) -> None:
    """What no engine that we know has room for would never serve. Raises AdapterTooLarge."""
    for ready in (engine.ready for engine in state.replicas.engines):
        if (
            ready is not None
            and spec.packed_bytes * (2 if ready.dtype == "float32" else 1) > ready.adapter_memory_bytes
        ):
            raise AdapterTooLarge(
                "adapter_too_large", f"the engine's adapter memory has only {ready.adapter_memory_bytes} bytes"
            )


async def _check_free(state: State, owner: str, name: str) -> None:
    """Spares the check of a body that can't be registered; register() decides."""
    state.registry.check_name(name)
    with suppress(AdapterNotFound):
        await state.registry.get(owner, name)
        raise NameTaken("adapter_exists", f"there is an adapter named {name}", "name")


async def _withdraw_if_orphaned(request: Request, owner: str, adapter: Adapter) -> None:
    """A tenant that was deleted during the upload must leave no adapter behind for one of the same id."""
    state = state_of(request)
    try:
        await state.directory.get(owner)
    except TenantNotFound:
        await state.registry.retire(owner, adapter.name, actor_of(request))
        raise


def _answer(state: State, adapter: Adapter, version: Version, status: int = 200) -> JSONResponse:
    """The version as it is now; if it is the current one, the engines are told to load it."""
    task = BackgroundTask(warm, state, version.ref) if version.version == adapter.current else None
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


def _size(stage: Path) -> int:
    return sum(path.stat().st_size for path in stage.iterdir())


def as_object(adapter: Adapter, version: Version) -> dict[str, Any]:
    """An adapter in one of its versions."""
    return {
        "object": "adapter",
        "id": adapter.name,
        "tenant": adapter.tenant_id or None,
        **_version_object(version),
        "status": "ready",
        "current_version": adapter.current,
    }


async def _with_health(request: Request, adapter: Adapter) -> dict[str, Any]:
    """The adapter in its current version; failed, with the reason, when its stored files are damaged."""
    version = adapter.version()
    problem = await asyncio.to_thread(state_of(request).store.problem, version.digest)
    failed = {} if problem is None else {"status": "failed", "reason": problem}
    return as_object(adapter, version) | failed


def _version_object(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "digest": f"sha256:{version.digest}",
        "rank": version.rank,
        "target_modules": list(version.target_modules),
        "num_modules": version.num_modules,
        "num_tensors": version.num_tensors,
        "size_bytes": version.size_bytes,
        "base_model": version.base_model,
        "warnings": list(version.warnings),
        "created_at": unix(version.created_at),
    }


def _scales(state: State, digest: str) -> dict[str, Any]:
    """What B·A is multiplied by, module by module, as the stored files say; nothing when they are damaged."""
    try:
        spec = describe(state.store.path(digest), state.shape)
    except (AdapterError, OSError):
        return {}
    return {"scales": sorted({round(module.scale, 6) for module in spec.modules if module.rank})}


def _residency(state: State, digest: str) -> list[dict[str, Any]]:
    """Where it is, as the engines last said: state is loading, resident or failed."""
    return [
        {"engine": index, "state": found.state, "num_running": found.num_pins}
        for index, engine in enumerate(state.replicas.engines)
        for found in (engine.stats.adapters if engine.stats else ())
        if found.digest == digest
    ]
