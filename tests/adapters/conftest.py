"""Fixtures of tests/adapters: a migrated database, a Redis, a registry upon them, and a tenant "acme" and "other"."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from adapters.registry import AdapterRegistry
from tenants.audit import Actor
from tenants.db import Database
from tenants.directory import TenantDirectory, TenantSpec
from tenants.epochs import Epochs
from tenants.state import connect

ADMIN = Actor("admin", "req_1")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    yield found
    await found.close()


@pytest.fixture
async def epochs(database: Database, redis_url: str) -> AsyncIterator[Epochs]:
    redis = connect(redis_url)
    epochs = Epochs(database, redis)
    for tenant_id in ("acme", "other"):
        await TenantDirectory(database, epochs).create(TenantSpec(tenant_id), ADMIN)
    yield epochs
    await redis.aclose()


@pytest.fixture
def registry(database: Database, epochs: Epochs) -> AdapterRegistry:
    return AdapterRegistry(database, epochs, reserved=("SmolLM2-135M",))
