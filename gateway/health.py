"""/livez, /readyz, /health for those who watch, without a key, by GET or HEAD; /metrics with the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.auth import AdminPrincipal, requires, state_of
from tenants.db import StateUnavailable

router = APIRouter(tags=["health"])
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
async def livez() -> dict[str, str]:
    """This process answers."""
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """200 when a request would be served now: engine, database and Redis answer. Else 503, saying which does not."""
    state = state_of(request)
    database, redis = await asyncio.gather(_answers(state.database.ping()), _answers(state.redis.ping()))
    parts = {"engine": state.replicas.answers, "database": database, "redis": redis}
    is_ready = all(parts.values())
    body: dict[str, Any] = {"status": "ready" if is_ready else "unavailable"}
    body |= {name: "ok" if is_up else "away" for name, is_up in parts.items()}
    return JSONResponse(body, 200 if is_ready else 503)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """As vLLM's: 200 while the engine answers."""
    return Response(status_code=200 if state_of(request).replicas.answers else 503)


@router.get("/metrics")
async def metrics(request: Request, _: AdminPrincipal = Depends(requires("admin"))) -> Response:
    """Sums over all workers, and the engines' gauges, for Prometheus."""
    state = state_of(request)
    return Response(await state.metrics.render(state.replicas), media_type=METRICS_TYPE)


async def _answers(ping: Awaitable[Any]) -> bool:
    try:
        await ping
    except StateUnavailable:
        return False
    return True
