"""The SQL database: Base, Database (sessions on PostgreSQL or SQLite), errors. Knows no table.

StateUnavailable             a store that must answer does not; try again later
├── DatabaseUnavailable      SQL: refused, hung, out of connections, locked for too long
└── RedisUnavailable         (tenants.state)
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, DateTime, Dialect, MetaData, Select, TypeDecorator, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute

from tenants.patience import Deadline, Turns, TurnsStopped, wait_within

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
ANSWER_S = 0.8
"""A server that gives no connection within this time counts as away; so does one whose connections are all in use and
none of which comes back for so long."""
STATEMENT_S = 30.0
"""The longest that one statement of a request may take on PostgreSQL."""
LOCK_S = 10.0
"""How long a writer waits for another one on SQLite."""


Row = TypeVar("Row")


class StateUnavailable(Exception):
    """A store that must answer does not. Nothing is decided: neither yes nor no."""

    retry_after_s = 1.0


class DatabaseUnavailable(StateUnavailable):
    """SQL does not answer."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC, on every database (SQLite itself keeps no zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError("a datetime without a time zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The root of all tables; every constraint has a predictable name, so that migrations can drop it."""

    metadata = MetaData(naming_convention=NAMES)


def now() -> datetime:
    return datetime.now(UTC)


def async_url(url: str) -> URL:
    """`postgresql://…` and `sqlite:///…` with the asynchronous driver that Chorus uses."""
    parsed = make_url(url)
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    backend = parsed.drivername.split("+")[0]
    if backend not in drivers:
        raise ValueError(f"database {backend!r} is not supported: use postgresql:// or sqlite:///")
    return parsed.set(drivername=drivers[backend])


def make_engine(url: str, pool_size: int = 10, statement_s: float | None = STATEMENT_S) -> AsyncEngine:
    """An engine that fails fast: nothing connects before the first session. statement_s None: a statement takes as long
    as it takes."""
    parsed = async_url(url)
    if parsed.drivername.startswith("sqlite"):
        engine = create_async_engine(parsed, connect_args={"timeout": LOCK_S})
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    return create_async_engine(
        parsed, pool_size=pool_size, max_overflow=0, pool_timeout=ANSWER_S, pool_pre_ping=True, pool_recycle=1800,
        connect_args={"timeout": ANSWER_S, "command_timeout": statement_s},
    )  # fmt: skip


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we begin transactions ourselves: the driver would begin them too late
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={int(LOCK_S * 1000)}", "foreign_keys=ON", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    _write_ahead(cursor)
    cursor.close()


def _write_ahead(cursor: Any) -> None:
    """Who switches a new file to WAL needs it alone, and hears "locked" at once where somebody else does the same."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: upgrading a reader's lock fails with "locked" instead of waiting.
    is_writer = connection.get_execution_options().get("is_writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


class Database:
    """Sessions on one database. Every failure to get an answer is a DatabaseUnavailable."""

    def __init__(self, url: str, pool_size: int = 10) -> None:
        self.engine = make_engine(url, pool_size)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._answer_s = 2 * LOCK_S if self.is_sqlite else ANSWER_S
        self._read = async_sessionmaker(self.engine, expire_on_commit=False)
        self._write = async_sessionmaker(self.engine.execution_options(is_writer=True), expire_on_commit=False)
        self._turns = Turns(pool_size, self._answer_s)
        self._leaving: set[asyncio.Future[Any]] = set()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session to read with; whatever it changed is rolled back."""
        async with self._open(self._read()) as session:
            yield session

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed when the block ends, rolled back if it raises."""
        async with self._open(self._write()) as session:
            yield session
            await session.commit()

    async def page(
        self, wanted: Select[Any], key: InstrumentedAttribute[str], after: str | None, limit: int
    ) -> tuple[list[Row], bool]:
        """Of the rows `wanted`, in the order of `key`, `limit` ones beyond `after`; and whether there are more."""
        if after is not None:
            wanted = wanted.where(key > after)
        async with self.session() as session:
            rows = list(await session.scalars(wanted.order_by(key).limit(limit + 1)))
        return rows[:limit], len(rows) > limit

    async def ping(self) -> None:
        """Raises DatabaseUnavailable unless the database answers."""
        async with self.session():
            pass

    async def close(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=ANSWER_S)
        await self.engine.dispose()

    @asynccontextmanager
    async def _open(self, session: AsyncSession) -> AsyncIterator[AsyncSession]:
        try:
            await self._turns.take()
        except TurnsStopped as error:
            raise DatabaseUnavailable(f"the database gives no connection: {error}") from error
        connecting = self._start(session.connection())
        has_worked = True
        try:
            try:
                if not await wait_within(connecting, self._answer_s):
                    raise TimeoutError
                connecting.result()
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                raise DatabaseUnavailable(f"the database gives no connection: {type(error).__name__}") from error
            try:
                yield session
            except (DBAPIError, PoolTimeout, ConnectionError, TimeoutError) as error:
                if isinstance(error, DBAPIError) and not _is_outage(error):
                    raise  # an answer: the caller knows what it means
                raise DatabaseUnavailable(f"the database does not answer: {type(error).__name__}") from error
        except DatabaseUnavailable:
            has_worked = False
            raise
        finally:
            connecting.cancel()
            leaving = self._start(self._leave(session, connecting))
            leaving.add_done_callback(lambda _: self._turns.give(has_worked=has_worked))
            if has_worked:
                await asyncio.shield(leaving)

    async def _leave(self, session: AsyncSession, connecting: asyncio.Future[Any]) -> None:
        """A session can be closed once nothing happens in it: what connects late would never be given back."""
        await asyncio.wait({connecting})
        with suppress(TimeoutError):
            async with Deadline(self._answer_s):
                await session.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Goes on whoever is cancelled; what hangs is left to end on its own."""
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Future[Any]) -> None:
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # seen


def _is_outage(error: DBAPIError) -> bool:
    """Is it the server that fails, rather than our statement?"""
    if error.connection_invalidated:
        return True
    sqlstate = getattr(error.orig, "sqlstate", None) or ""
    return sqlstate.startswith(_OUTAGE_STATES) or _sqlite_name(error) in _OUTAGE_NAMES


def _sqlite_name(error: DBAPIError) -> str:
    name = str(getattr(error.orig, "sqlite_errorname", ""))
    return "SQLITE_IOERR" if name.startswith("SQLITE_IOERR") else name


_OUTAGE_STATES = ("08", "40", "53", "55P03", "57", "58", "XX")
"""PostgreSQL: connection, rolled back (deadlock), resources, lock, operator, system, internal."""
_OUTAGE_NAMES = {
    "SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY",
    "SQLITE_IOERR",
}  # fmt: skip
