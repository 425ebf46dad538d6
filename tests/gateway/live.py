"""A gateway as clients meet it: the whole application on a real socket, with real stores and a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio as redis
import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from sqlalchemy import select

from engine.protocol import Generate
from engine.text import Tokenizer
from gateway.app import create_app
from gateway.http_guard import GuardedProtocol
from gateway.settings import Settings
from tenants.db import Database
from tenants.models import AuditEntry
from tenants.slots import TenantSlot
from tests.fakes import FakeEngine

ADMIN_KEY = "an-admin-key-for-tests"
EOS = 2  # <|im_end|> of the tiny model


@dataclass
class Live:
    """A running gateway. What `answers` holds is said in turn, then "ok"."""

    settings: Settings
    tokenizer: Tokenizer
    stack: AsyncExitStack
    url: str = ""
    answers: list[str] = field(default_factory=list)
    engine: FakeEngine = field(init=False)
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    keys: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self._reply)

    def reset(self) -> None:
        """The engine as it was at the start, for the next test on the same gateway."""
        self.answers.clear()
        self.engine.__init__(self._reply)  # type: ignore[misc]
        self.engine.__dict__.pop("generate", None)

    def _reply(self, request: Generate) -> list[list[int]]:
        text = self.answers.pop(0) if self.answers else "ok"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), EOS]
        return [ids[: request.params.max_tokens]] * request.params.n

    def prompts(self) -> list[str]:
        """What the engine was asked, as text."""
        return [self.tokenizer.decode(request.prompt, skip_special_tokens=False) for request in self.engine.requests]

    async def audit(self) -> list[AuditEntry]:
        """The audit log, oldest first."""
        database = Database(self.settings.database_url)
        try:
            async with database.session() as session:
                return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))
        finally:
            await database.close()

    async def num_leases(self, tenant: str) -> int:
        """Requests of the tenant that hold a place now."""
        async with redis.Redis.from_url(self.settings.redis_url) as store:
            return int(await store.zcard(TenantSlot(tenant).leases))

    async def http(self, key: str = ADMIN_KEY) -> httpx.AsyncClient:
        """A client with this key; the same one for the same key."""
        if key not in self.clients:
            client = httpx.AsyncClient(
                base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60, verify=False
            )
            self.clients[key] = await self.stack.enter_async_context(client)
        return self.clients[key]

    async def openai(self, key: str, **options: Any) -> AsyncOpenAI:
        options = {"max_retries": 0, "http_client": DefaultAsyncHttpxClient(verify=False)} | options
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)
        return await self.stack.enter_async_context(client)

    async def key(self, tenant: str, *scopes: str) -> str:
        """A key of `tenant`, which is made if it is new; the same one for the same scopes."""
        if (tenant, *scopes) in self.keys:
            return self.keys[tenant, *scopes]
        admin = await self.http()
        await admin.post("/admin/v1/tenants", json={"id": tenant})
        body = {"name": "test", "scopes": list(scopes or ("inference",))}
        answer = await admin.post(f"/admin/v1/tenants/{tenant}/keys", json=body)
        assert answer.status_code == 201, answer.text
        self.keys[tenant, *scopes] = str(answer.json()["key"])
        return self.keys[tenant, *scopes]


@asynccontextmanager
async def serve(model: Path, data_dir: Path, database_url: str, redis_url: str, **settings: Any) -> AsyncIterator[Live]:
    """A gateway on a free port of 127.0.0.1."""
    chosen = Settings(
        model=str(model), data_dir=data_dir, database_url=database_url, redis_url=redis_url, admin_key=ADMIN_KEY,
        pepper="a-pepper-for-tests", served_name="tiny", **settings,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        live = Live(chosen, Tokenizer(model), stack)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(chosen, live.engine),
                port=0,
                http=GuardedProtocol,
                log_level="error",
                ws="none",
                lifespan="on",
                proxy_headers=False,
            )
        )
        task = asyncio.create_task(server.serve())
        while not server.started:
            assert not task.done(), "the gateway did not start"
            await asyncio.sleep(0.005)
        live.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield live
        finally:
            await stack.aclose()  # clients first: open connections would hold up the server
            server.should_exit = True
            await task
