"""create_app(settings): the gateway of one worker. The lifespan builds State and yields it; nothing happens at import.

Context (ids, times, faults) → Authenticate → StrictBodies → Direct → routes
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from adapters.registry import AdapterRegistry
from adapters.storage import DirectoryStore
from engine.client import Engine, EngineClient
from engine.model.config import ModelConfig
from engine.text import Tokenizer
from gateway import conversation_routes, health, openai, responses
from gateway.admin import adapters, admin_keys, audit, engine, keys, pins, plans, tenants, usage
from gateway.auth import Authenticate
from gateway.bodies import StrictBodies
from gateway.context import Context
from gateway.conversations import ConversationStore
from gateway.direct import Direct
from gateway.errors import from_details, to_api_error
from gateway.inference import Inference
from gateway.metrics import Metrics
from gateway.models import Model, ModelTable
from gateway.openapi import Gateway
from gateway.pins import Pins
from gateway.prompts import PromptEncoder
from gateway.replicas import ReplicaSet
from gateway.settings import Settings
from gateway.state import State
from gateway.upload import UploadGate
from tenants.admin_keys import AdminKeyRing
from tenants.audit import AuditLog
from tenants.db import Database, StateUnavailable
from tenants.directory import TenantDirectory
from tenants.epochs import Epochs
from tenants.key_format import Pepper
from tenants.keys import KeyRing
from tenants.plans import PlanBook
from tenants.quotas import Quotas
from tenants.state import MEMORY_URL, connect
from tenants.upkeep import Upkeep
from tenants.usage import UsageLedger

log = logging.getLogger("chorus.gateway")
COLLECT_EVERY_S = 600.0


def create_app(settings: Settings, engine: Engine | None = None) -> FastAPI:
    """The application. `engine` stands in for the engines of settings.engine_endpoints (tests, embedding)."""
    app = Gateway(
        title="Chorus",
        version=version("chorus-serve"),
        lifespan=lambda _: _lifespan(settings, engine),
        redirect_slashes=False,
        middleware=[
            Middleware(Context),
            Middleware(Authenticate),
            Middleware(StrictBodies),
            Middleware(Direct, routes=[*openai.router.routes, *responses.router.routes]),
        ],
        exception_handlers={HTTPException: _answer_error, RequestValidationError: _answer_invalid},
    )
    for router in ROUTERS:
        app.include_router(router)
    return app


ROUTERS = (
    health.router, openai.router, responses.router, conversation_routes.router, tenants.router, keys.router,
    plans.router, admin_keys.router, usage.router, usage.own_router, audit.router, engine.router, *adapters.routers,
    *pins.routers,
)  # fmt: skip


async def _answer_error(_: Request, error: Exception) -> Response:
    return to_api_error(error).response()


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = cast("list[ErrorDetails]", [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()])
    return from_details(details).response()


@asynccontextmanager
async def _lifespan(settings: Settings, engine: Engine | None) -> AsyncIterator[dict[str, State]]:
    async with AsyncExitStack() as stack:
        yield {"chorus": await _build(settings, engine, stack)}


async def _build(settings: Settings, engine: Engine | None, stack: AsyncExitStack) -> State:
    """Every service, in the order in which they need each other; the stack closes them in reverse."""
    model = ModelConfig.from_dir(settings.model_dir)
    database = Database(settings.database_url)
    stack.push_async_callback(database.close)
    redis = connect(settings.redis_url or MEMORY_URL)
    stack.push_async_callback(redis.aclose)
    epochs = Epochs(database, redis)
    quotas, ledger = Quotas(redis), UsageLedger(database)
    await stack.enter_async_context(Upkeep(redis, quotas, ledger, epochs))
    metrics = await stack.enter_async_context(Metrics(redis))
    replicas = ReplicaSet(
        [engine] if engine else [await _connect(e, settings, stack) for e in settings.engine_endpoints]
    )
    registry = AdapterRegistry(database, epochs, reserved=[settings.base_name])
    store = DirectoryStore(settings.store_dir)
    await _collect_in_background(registry, store, settings, stack)
    tokenizer = Tokenizer(settings.model_dir)
    base = Model(settings.base_name, settings.base_name, created=int(settings.model_dir.stat().st_mtime))
    inference = Inference(
        models=ModelTable(registry, base, min(settings.max_model_len or model.max_position, model.max_position)),
        replicas=replicas, quotas=quotas, metrics=metrics, encoder=PromptEncoder(tokenizer),
        timeout_s=settings.request_timeout_s,
    )  # fmt: skip
    stack.push_async_callback(inference.close)
    return State(
        settings=settings, database=database, redis=redis, keys=KeyRing(database, redis, settings.pepper),
        admin_keys=AdminKeyRing(database, redis, Pepper.parse(settings.pepper), settings.admin_key),
        quotas=quotas, ledger=ledger, directory=TenantDirectory(database, epochs), plans=PlanBook(database, epochs),
        registry=registry, store=store, audit=AuditLog(database),
        shape=model.base_shape(), replicas=replicas, tokenizer=tokenizer, inference=inference,
        conversations=ConversationStore(redis, settings.conversation_ttl_s), metrics=metrics,
        uploads=UploadGate(), pins=await stack.enter_async_context(Pins(redis, registry, replicas)),
    )  # fmt: skip


async def _connect(endpoint: str, settings: Settings, stack: AsyncExitStack) -> EngineClient:
    client = EngineClient(endpoint, settings.engine_key or None)
    await client.start()
    stack.push_async_callback(client.close)
    return client


async def _collect_in_background(
    registry: AdapterRegistry, store: DirectoryStore, settings: Settings, stack: AsyncExitStack
) -> None:
    """Files that no version refers to go, long after any request or upload that could need them has ended."""

    async def collect() -> None:
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            try:
                gone = await registry.collect(store, grace_s=2 * settings.request_timeout_s + 3600)
                log.info("deleted %d stored adapters that nothing refers to", len(gone))
            except (StateUnavailable, OSError) as error:
                log.warning("stored adapters were not collected: %s", error)

    task = asyncio.create_task(collect())

    async def stop() -> None:
        task.cancel()
        await asyncio.wait({task})

    stack.push_async_callback(stop)
