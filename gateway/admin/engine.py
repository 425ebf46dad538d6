"""/admin/v1/engine: what each engine is and does, as it last said."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request

from engine.client import Engine
from gateway.auth import requires, state_of
from gateway.engine_metrics import CLASSES

router = APIRouter(prefix="/admin/v1/engine", tags=["engine"], dependencies=[Depends(requires("admin"))])


@router.get("")
async def read_engines(request: Request) -> dict[str, Any]:
    """Configuration and state of every engine. Lanes are tenants; classes are priorities."""
    engines = state_of(request).replicas.engines
    return {"object": "list", "data": [_engine_object(index, engine) for index, engine in enumerate(engines)]}


def _engine_object(index: int, engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {"object": "engine", "id": index, "is_up": engine.ready is not None}
    if engine.ready is not None:
        found["config"] = msgspec.structs.asdict(engine.ready)
    if engine.ready is not None and engine.stats is not None:
        stats = msgspec.structs.asdict(engine.stats)
        found["classes"] = [_named(one) for one in stats.pop("classes")]
        found["lanes"] = [_named(one) for one in stats.pop("lanes")]
        found["kv_tiers"] = [msgspec.structs.asdict(one) for one in stats.pop("kv_tiers")]
        found["adapters"] = [msgspec.structs.asdict(one) for one in stats.pop("adapters")]
        found["stats"] = stats
    return found


def _named(state: msgspec.Struct) -> dict[str, Any]:
    found = msgspec.structs.asdict(state)
    return {"priority": CLASSES[found.pop("priority")], **found}
