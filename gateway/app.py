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

from adapters.bucket_store import open_store
from adapters.registry import AdapterRegistry
from adapters.storage import AdapterStore
from engine.client import Engine, EngineClient
from engine.model.config import ModelConfig
from engine.template_sandbox import TemplateSandbox
from engine.text import Tokenizer
from gateway import conversation_routes, health, openai, responses
from gateway.admin import adapter_moves, adapters, admin_keys, audit, engine, keys, pins, plans, sources, tenants, usage
from gateway.auth import Authenticate
from gateway.bodies import StrictBodies
from gateway.context import Context
from gateway.conversation_store import ConversationStore
from gateway.direct import Direct
from gateway.errors import from_details, to_api_error
from gateway.idempotency import Idempotent
from gateway.inference import Inference
from gateway.kv_owners import KVOwners
from gateway.metrics import Metrics
from gateway.models import Model, ModelTable
from gateway.openapi import Gateway
from gateway.pins import Pins
from gateway.probes import Prober
from gateway.profiles import Profiles
from gateway.prompts import PromptEncoder
from gateway.replays import Replays
from gateway.replicas import ReplicaSet
from gateway.settings import Settings
from gateway.sources import Sources
from gateway.state import State
from gateway.upload import UploadGate
from tenants.adapter_limits import AdapterLimits
from tenants.admin_keys import AdminKeyRing
from tenants.audit import AuditLog
from tenants.db import Database, StateUnavailable
from tenants.directory import TenantDirectory
from tenants.epochs import Epochs
from tenants.key_format import Pepper
from tenants.keys import KeyRing
from tenants.owners import OwnerBook
from tenants.periodic import Periodic
from tenants.plans import PlanBook
from tenants.quotas import Quotas
from tenants.state import MEMORY_URL, connect
from tenants.upkeep import Upkeep
from tenants.usage import UsageLedger

log = logging.getLogger("chorus.gateway")
COLLECT_EVERY_S = 600.0
HEARD_WITHIN_S = 1.0
"""Until then a worker that starts waits for its engines; without them it says that they are away."""


def create_app(settings: Settings, engine: Engine | None = None) -> FastAPI:
    """The application. `engine` stands in for the engines of settings.engine_endpoints (tests, embedding)."""
    app = Gateway(
        title="Chorus",
        version=version("chorus-serve"),
        lifespan=lambda app: _lifespan(app, settings, engine),
        redirect_slashes=False,
        docs_url=None,  # they would load scripts of others, and no browser sends the key
        redoc_url=None,
        middleware=[
            Middleware(Context),
            Middleware(Authenticate),
            Middleware(StrictBodies),
            Middleware(Idempotent),
            Middleware(Direct, routes=[*openai.router.routes, *responses.router.routes]),
        ],
        exception_handlers={HTTPException: _answer_error, RequestValidationError: _answer_invalid},
    )
    for router in ROUTERS:
        app.include_router(router)
    return app


def has_engine(app: FastAPI) -> bool:
    """An engine answers this worker."""
    replicas: ReplicaSet | None = getattr(app.state, "replicas", None)
    return replicas is not None and replicas.answers


ROUTERS = (
    health.router, openai.router, responses.router, conversation_routes.router, tenants.router, keys.router,
    plans.router, admin_keys.router, usage.router, usage.own_router, audit.router, engine.router, *adapters.routers,
    *adapter_moves.routers, *pins.routers, sources.router,
)  # fmt: skip


async def _answer_error(_: Request, error: Exception) -> Response:
    return to_api_error(error).response()


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = cast("list[ErrorDetails]", [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()])
    return from_details(details).response()


@asynccontextmanager
async def _lifespan(app: FastAPI, settings: Settings, engine: Engine | None) -> AsyncIterator[dict[str, State]]:
    async with AsyncExitStack() as stack:
        state = await _build(settings, engine, stack)
        app.state.replicas = state.replicas
        await stack.enter_async_context(Sources(state))
        yield {"chorus": state}


async def _build(settings: Settings, engine: Engine | None, stack: AsyncExitStack) -> State:
    """Every service, in the order in which they need each other; the stack closes them in reverse."""
    model = ModelConfig.from_dir(settings.model_dir)
    database = Database(settings.database_url)
    stack.push_async_callback(database.close)
    redis = connect(settings.redis_url or MEMORY_URL)
    stack.push_async_callback(redis.aclose)
    epochs = Epochs(database, redis)
    pepper = Pepper.parse(settings.pepper)
    quotas, ledger, directory = Quotas(redis), UsageLedger(database), TenantDirectory(database, epochs)
    await stack.enter_async_context(Upkeep(redis, quotas, ledger, epochs))
    conversations = ConversationStore(redis, settings.conversation_ttl_s, directory.keeping)
    metrics = await stack.enter_async_context(Metrics(redis))
    replicas = ReplicaSet([engine] if engine else await _connect(settings, stack))
    limits = AdapterLimits(settings.max_adapters_per_tenant, settings.max_adapter_bytes_per_tenant)
    registry = AdapterRegistry(database, epochs, [settings.base_name], model.fingerprint, limits)
    store = open_store(settings.store_dir, settings.bucket)
    await _collect_in_background(registry, store, settings, stack)
    tokenizer = Tokenizer(settings.model_dir)
    sandbox = TemplateSandbox(*tokenizer.template_setting)
    stack.callback(sandbox.close)
    base = Model(settings.base_name, settings.base_name, created=int(settings.model_dir.stat().st_mtime))
    inference = Inference(
        models=ModelTable(registry, base, min(settings.max_model_len or model.max_position, model.max_position)),
        replicas=replicas, quotas=quotas, metrics=metrics, encoder=PromptEncoder(tokenizer),
        profiles=Profiles(store, sandbox, model.vocab_size, tokenizer),
        timeout_s=settings.request_timeout_s,
    )  # fmt: skip
    stack.push_async_callback(inference.close)
    return State(
        settings=settings, database=database, redis=redis, keys=KeyRing(database, redis, settings.pepper),
        admin_keys=AdminKeyRing(database, redis, pepper, settings.admin_key),
        quotas=quotas, ledger=ledger, directory=directory, plans=PlanBook(database, epochs),
        registry=registry, store=store, audit=AuditLog(database),
        shape=model.base_shape(), prober=Prober(inference, epochs, redis), replicas=replicas,
        tokenizer=tokenizer, inference=inference,
        conversations=conversations, replays=Replays(redis, pepper, conversations.keeping), metrics=metrics,
        uploads=UploadGate(), pins=await stack.enter_async_context(Pins(redis, registry, replicas)),
        kv_owners=await stack.enter_async_context(KVOwners(OwnerBook(database, pepper), replicas)),
    )  # fmt: skip


async def _connect(settings: Settings, stack: AsyncExitStack) -> list[EngineClient]:
    """Engines that are there are heard before the first request comes: a worker that is started again beside them
    refuses nothing."""
    clients = [EngineClient(endpoint, settings.engine_key or None) for endpoint in settings.engine_endpoints]
    for client in clients:
        await client.start()
        stack.push_async_callback(client.close)
    await asyncio.gather(*(client.wait_ready(HEARD_WITHIN_S) for client in clients), return_exceptions=True)
    return clients


async def _collect_in_background(
    registry: AdapterRegistry, store: AdapterStore, settings: Settings, stack: AsyncExitStack
) -> None:
    """Files that no version refers to go, long after any request or upload that could need them has ended."""
    grace_s = settings.adapter_grace_s
    if grace_s < 2 * settings.request_timeout_s:
        log.warning(
            "adapter_grace is %g s, less than two request timeouts: requests that wait, and uploads under way, may "
            "lose their files", grace_s,
        )  # fmt: skip

    async def collect() -> None:
        try:
            gone = await registry.collect(store, grace_s)
            log.info("deleted %d stored adapters that nothing refers to", len(gone))
        except (StateUnavailable, OSError) as error:
            log.warning("stored adapters were not collected: %s", error)

    await stack.enter_async_context(Periodic(collect, min(COLLECT_EVERY_S, max(1.0, grace_s))))
