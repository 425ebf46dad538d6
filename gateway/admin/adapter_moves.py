"""Which version of an adapter answers: activation, canaries, rollback, probes, aliases; deletion of single versions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from adapters.records import Move
from gateway.admin.adapters import PREFIXES, Owner, answer, evict
from gateway.admin.bodies import Body, actor_of
from gateway.auth import state_of
from gateway.bodies import PARSED, body_as
from gateway.models import Model
from gateway.openai import body_of
from gateway.probes import check_probes

VersionNumber = Annotated[int, Field(ge=1, le=10**9)]
Believed = Annotated[int, Field(ge=0, le=10**9)] | None


class Activation(Body):
    """`percent` below 100 makes a canary of it, 0 ends that. `if_current`, `if_canary` (0 = none): only if it is so.
    `force`: the probes are not asked."""

    version: VersionNumber
    percent: Annotated[int, Field(ge=0, le=100)] = 100
    if_current: Believed = None
    if_canary: Believed = None
    force: bool = False


class Rollback(Body):
    """`if_current`: only if this version is the current one."""

    if_current: Believed = None


class AliasTarget(Body):
    """`if_current`: only if the alias stands for this version; 0 = only if there is no such alias."""

    version: VersionNumber
    if_current: Believed = None


class NewProbes(Body):
    """In place of those that it has."""

    probes: list[Any]


async def activate_version(request: Request, owner: Owner, name: str) -> JSONResponse:
    """Acts at the next request on every worker; who is being answered stays with the version that began."""
    body = body_as(request, Activation)
    state = state_of(request)
    before = await state.registry.get(owner, name)
    is_forced = body.force and bool(before.probes)
    wanted = Move(body.version, body.percent, body.if_current, body.if_canary, is_forced)
    if body.percent and not body.force:
        version = before.version(body.version)
        version.check_base(name, state.registry.base)
        model = Model(name, name, version.ref, version.version, owner, companions=version.companions)
        await state.prober.run(model, before.probes)
    adapter = await state.registry.activate(owner, name, wanted, actor_of(request))
    return answer(state, adapter, adapter.version(body.version))


async def roll_back(request: Request, owner: Owner, name: str) -> JSONResponse:
    """Ends a canary; where there is none, the version that was current before is so again."""
    body = body_as(request, Rollback) if request.scope.get(PARSED) is not None else Rollback()
    state = state_of(request)
    adapter = await state.registry.roll_back(owner, name, actor_of(request), body.if_current)
    return answer(state, adapter, adapter.version())


async def set_alias(request: Request, owner: Owner, name: str, alias: str) -> JSONResponse:
    """Makes the alias, or moves it."""
    body = body_as(request, AliasTarget)
    adapter, is_new = await state_of(request).registry.set_alias(
        owner, name, alias, body.version, actor_of(request), body.if_current
    )
    found = _alias_object(adapter.name, alias, adapter.aliases[alias])
    return JSONResponse(found, status_code=201 if is_new else 200)


async def list_aliases(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    adapter = await state_of(request).registry.get(owner, name)
    data = [_alias_object(name, alias, version) for alias, version in adapter.aliases.items()]
    return {"object": "list", "data": data, "has_more": False}


async def delete_alias(request: Request, owner: Owner, name: str, alias: str) -> dict[str, Any]:
    await state_of(request).registry.delete_alias(owner, name, alias, actor_of(request))
    return {"object": "adapter.alias.deleted", "id": f"{name}:{alias}", "deleted": True}


async def delete_version(
    request: Request, owner: Owner, name: str, version: Annotated[int, Path(ge=1, le=10**9)]
) -> JSONResponse:
    """One that is not current, no canary and behind no alias."""
    state = state_of(request)
    digests = await state.registry.retire_version(owner, name, version, actor_of(request))
    body = {"object": "adapter.version.deleted", "id": f"{name}@{version}", "deleted": True}
    return JSONResponse(body, background=BackgroundTask(evict, state, digests))


async def read_probes(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    adapter = await state_of(request).registry.get(owner, name)
    return {"object": "adapter.probes", "id": name, "probes": adapter.probes}


async def set_probes(request: Request, owner: Owner, name: str) -> dict[str, Any]:
    """What a version must answer from now on before it becomes current, or a canary; [] = nothing."""
    probes = check_probes(body_as(request, NewProbes).probes)
    await state_of(request).registry.set_probes(owner, name, probes, actor_of(request))
    return {"object": "adapter.probes", "id": name, "probes": probes}


def _alias_object(name: str, alias: str, version: int) -> dict[str, Any]:
    return {"object": "adapter.alias", "id": f"{name}:{alias}", "version": version}


def _router(prefix: str, scope: Any) -> APIRouter:
    router = APIRouter(prefix=f"{prefix}/{{name}}", tags=["adapters"], dependencies=[Depends(scope)])
    for path, act, kind in (("/activate", activate_version, Activation), ("/rollback", roll_back, Rollback)):
        router.add_api_route(path, act, methods=["POST"], openapi_extra=body_of(kind))
    router.add_api_route("/aliases", list_aliases, methods=["GET"])
    router.add_api_route("/aliases/{alias}", set_alias, methods=["PUT"], openapi_extra=body_of(AliasTarget))
    router.add_api_route("/aliases/{alias}", delete_alias, methods=["DELETE"])
    router.add_api_route("/probes", read_probes, methods=["GET"])
    router.add_api_route("/probes", set_probes, methods=["PUT"], openapi_extra=body_of(NewProbes))
    router.add_api_route("/versions/{version}", delete_version, methods=["DELETE"])
    return router


routers = tuple(_router(prefix, scope) for prefix, scope in PREFIXES)
