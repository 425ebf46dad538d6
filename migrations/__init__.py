"""The schema and its history, on PostgreSQL and SQLite. upgrade(url) brings a database to the newest revision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from tenants.db import make_engine

_LOCK = 0x63686F727573
"""Of PostgreSQL's advisory locks, the one that migrations of Chorus take: two processes never migrate at once."""


def config() -> Config:
    """Alembic's configuration, without a file."""
    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return found


def head() -> str:
    """The newest revision."""
    return ScriptDirectory.from_config(config()).get_current_head() or ""


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database to `revision`. Safe to call from several processes at once, and from a running event loop."""
    _run(url, lambda connection: command.upgrade(_on(connection), revision))


def downgrade(url: str, revision: str) -> None:
    """Take the database back to `revision` ("base" = empty)."""
    _run(url, lambda connection: command.downgrade(_on(connection), revision))


def current(url: str) -> str:
    """The revision of the database; "" if it is empty."""
    found: list[str | None] = []
    _run(url, lambda connection: found.append(MigrationContext.configure(connection).get_current_revision()))
    return found[0] or ""


def _on(connection: Connection) -> Config:
    found = config()
    found.attributes["connection"] = connection
    return found


def _run(url: str, work: Callable[[Connection], object]) -> None:
    """In a thread of its own: the drivers are asynchronous, and the caller may already run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(_migrate(make_engine(url, statement_s=None), work))).result()


async def _migrate(engine: AsyncEngine, work: Callable[[Connection], object]) -> None:
    try:
        async with engine.execution_options(is_writer=True).begin() as connection:
            if engine.dialect.name == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            await connection.run_sync(work)
    finally:
        await engine.dispose()
