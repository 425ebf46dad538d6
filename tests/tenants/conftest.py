"""Fixtures of tests/tenants: a database, a Redis, and the services upon them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tenants.audit import Actor
from tenants.db import Database
from tenants.directory import TenantDirectory
from tenants.epochs import Epochs
from tenants.keys import KeyRing
from tenants.state import Client, connect

ADMIN = Actor("admin", "req_1", is_admin=True)
PEPPER = "1:a-pepper-for-tests"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    yield found
    await found.close()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def epochs(database: Database, redis: Client) -> Epochs:
    return Epochs(database, redis)


@pytest.fixture
def directory(database: Database, epochs: Epochs) -> TenantDirectory:
    return TenantDirectory(database, epochs)


@pytest.fixture
def keys(database: Database, redis: Client) -> KeyRing:
    return KeyRing(database, redis, PEPPER)
