"""The database when it is slow, gone or busy: unavailable is an answer within a second, never a wrong one."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

import migrations
from tenants import audit
from tenants.audit import Act
from tenants.db import ANSWER_S, Database, DatabaseUnavailable, async_url
from tenants.directory import TenantDirectory, TenantSpec
from tenants.epochs import Epochs
from tenants.key_format import make_key
from tenants.keys import InvalidKey, KeyRing, KeySpec
from tenants.models import AuditEntry
from tenants.state import Client
from tests.services import PostgresServer
from tests.tenants.conftest import ADMIN, PEPPER

BOUND_S = ANSWER_S + 0.7
"""An answer within ANSWER_S, and room for a loaded machine."""


async def timed(work: Any) -> tuple[Any, float]:
    """(result or StateUnavailable, seconds)."""
    started = time.perf_counter()
    result = (await asyncio.gather(work, return_exceptions=True))[0]
    return result, time.perf_counter() - started


@pytest.fixture
async def postgres(own_postgres: PostgresServer) -> AsyncIterator[Database]:
    url = own_postgres.create()
    migrations.upgrade(url)
    database = Database(url, pool_size=2)
    yield database
    await database.close()


async def fail(database: Database, act: Act, error: Exception) -> None:
    async with database.begin() as session:
        audit.append(session, ADMIN, act)
        raise error


async def execute(database: Database, statement: str) -> None:
    async with database.begin() as session:
        await session.execute(text(statement))


def test_urls() -> None:
    """Plain URLs get our drivers; other databases are refused by name."""
    assert async_url("postgresql://u:p@h/d").drivername == "postgresql+asyncpg"
    assert async_url("sqlite:///x.db").drivername == "sqlite+aiosqlite"
    with pytest.raises(ValueError, match="mysql"):
        async_url("mysql://u@h/d")


async def test_transaction_is_all_or_nothing(database: Database) -> None:
    """begin() commits at the end of its block and rolls back if that raises; session() never writes."""
    with pytest.raises(ZeroDivisionError):
        await fail(database, Act("test"), ZeroDivisionError())
    async with database.session() as session:
        audit.append(session, ADMIN, Act("test"))
        await session.flush()
    async with database.begin() as session:
        audit.append(session, ADMIN, Act("kept"))

    async with database.session() as session:
        assert list(await session.scalars(select(AuditEntry.action))) == ["kept"]


async def test_our_own_mistakes_are_not_outages(database: Database) -> None:
    """A duplicate or a wrong statement is raised as what it is."""
    with pytest.raises(IntegrityError):
        await execute(database, "INSERT INTO epoch_outbox (id, tenant_id) VALUES (1, 'a'), (1, 'b')")
    with pytest.raises(Exception, match="no_such_table") as caught:
        await execute(database, "SELECT * FROM no_such_table")
    assert not isinstance(caught.value, DatabaseUnavailable)


async def test_server_without_room(own_postgres: PostgresServer, postgres: Database) -> None:
    """DB-04: a server that takes no more connections is an outage, and ends with it."""
    others = [Database(own_postgres.url()) for _ in range(40)]
    async with AsyncExitStack() as stack:
        opened = [(await timed(stack.enter_async_context(other.session())))[0] for other in others]
        assert {type(answer) for answer in opened} == {AsyncSession, DatabaseUnavailable}
        with pytest.raises(DatabaseUnavailable):
            await postgres.ping()
    for other in others:
        await other.close()

    await postgres.ping()


async def test_errors_of_the_block_are_its_own(database: Database) -> None:
    """What the caller's code raises inside a session is not taken for an outage."""
    for error in (FileNotFoundError("x"), LookupError("x"), DatabaseUnavailable("x")):
        with pytest.raises(type(error)) as caught:
            await fail(database, Act("test"), error)
        assert caught.value is error


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_away_means_unavailable(
    own_postgres: PostgresServer, postgres: Database, redis: Client, fault: str
) -> None:
    """DB-02, DB-04: PostgreSQL killed or stopped: what needs SQL is DatabaseUnavailable within a second, never
    InvalidKey; a key known by its epoch works on; all is well again once it is back."""
    keys = KeyRing(postgres, redis, PEPPER)
    await TenantDirectory(postgres, Epochs(postgres, redis)).create(TenantSpec("acme"), ADMIN)
    warm = (await keys.issue("acme", KeySpec("warm"), ADMIN)).key
    cold = (await keys.issue("acme", KeySpec("cold"), ADMIN)).key
    await keys.authenticate(warm)

    stop: Callable[[], None] = own_postgres.kill if fault == "kill" else lambda: own_postgres.signal(signal.SIGSTOP)
    stop()
    results = await asyncio.gather(*(timed(keys.authenticate(cold)) for _ in range(8)), timed(postgres.ping()))
    principal, _ = await timed(keys.authenticate(warm))
    if fault == "kill":
        own_postgres.start()
    else:
        own_postgres.signal(signal.SIGCONT)

    assert {type(result) for result, _ in results} == {DatabaseUnavailable}
    assert max(seconds for _, seconds in results) < BOUND_S
    assert principal.tenant_id == "acme"
    deadline = time.monotonic() + 30
    while isinstance((await timed(keys.authenticate(cold)))[0], DatabaseUnavailable):
        assert time.monotonic() < deadline
    assert (await keys.authenticate(cold)).tenant_id == "acme"


async def test_full_pool_is_no_401(postgres_server: PostgresServer, migrated_postgres: str, redis: Client) -> None:
    """DB-04: 120 first uses of keys at once over two connections: each is let in or told to come back; a key that
    does not exist is never let in."""
    postgres = Database(postgres_server.emptied(migrated_postgres), pool_size=2)
    keys = KeyRing(postgres, redis, PEPPER)
    await TenantDirectory(postgres, Epochs(postgres, redis)).create(TenantSpec("acme"), ADMIN)
    real = [(await keys.issue("acme", KeySpec(f"k{i}"), ADMIN)).key for i in range(60)]
    fake = [make_key()[1] for _ in range(60)]

    answers = await asyncio.gather(*(keys.authenticate(key) for key in real + fake), return_exceptions=True)

    assert all(not isinstance(answer, InvalidKey) for answer in answers[: len(real)])
    assert {type(answer) for answer in answers[len(real) :]} <= {InvalidKey, DatabaseUnavailable}
    assert not isinstance(answers[0], BaseException)
    await postgres.close()


async def test_sqlite_writers_wait_for_each_other(sqlite_url: str) -> None:
    """DB-03: 50 writers over two pools and a reader that stays open all the time: nothing is locked, nothing lost."""
    first, second = Database(sqlite_url), Database(sqlite_url)

    async def write(database: Database, number: int) -> None:
        async with database.begin() as session:
            seen = len(list(await session.scalars(select(AuditEntry.id))))
            audit.append(session, ADMIN, Act("write", target=f"{number} after {seen}"))

    async with first.session() as reader:
        assert list(await reader.scalars(select(AuditEntry.id))) == []
        await asyncio.gather(*(write((first, second)[i % 2], i) for i in range(50)))
        assert list(await reader.scalars(select(AuditEntry.id))) == []
    async with second.session() as session:
        targets = list(await session.scalars(select(AuditEntry.target)))
        assert await session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await session.scalar(text("PRAGMA foreign_keys")) == 1
    await first.close()
    await second.close()

    assert sorted(int(target.split()[-1]) for target in targets) == list(range(50))
