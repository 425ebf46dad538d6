"""Fixtures of tests/gateway: a running gateway on SQLite and Redis, for one test or for all of a module."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from tests.gateway.live import Live, serve
from tests.services import RedisServer


@pytest.fixture
async def live(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str) -> AsyncIterator[Live]:
    """The whole application with a fake engine, on a real socket."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_server(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path, redis_server: RedisServer
) -> AsyncIterator[Live]:
    directory = tmp_path_factory.mktemp("gateway")
    shutil.copy(migrated_sqlite, directory / "chorus.db")
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    async with serve(tiny_llama, directory, f"sqlite:///{directory}/chorus.db", redis_server.url) as running:
        yield running


@pytest.fixture
def server(module_server: Live) -> Live:
    """The same, started once for all tests of a module that says `pytest.mark.asyncio(loop_scope="module")`; tenants
    and keys stay, the engine is as new."""
    module_server.reset()
    return module_server
