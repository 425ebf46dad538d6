"""Migrations: up, down, and equal to what the models say, on both databases."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

import adapters.rows
import tenants.models
from migrations import current, downgrade, head, upgrade
from tenants.db import Base, Database

TABLES = {
    "plans",
    "admin_keys",
    "tenants",
    "api_keys",
    "usage_entries",
    "usage_days",
    "audit_entries",
    "epoch_outbox",
    "adapters",
    "adapter_versions",
    "adapter_aliases",
    "adapter_activations",
    "source_adapters",
}


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("postgres_url"))


async def _ask(url: str, question: Callable[[Any], Any]) -> Any:
    database = Database(url)
    async with database.engine.connect() as connection:
        answer = await connection.run_sync(question)
    await database.close()
    return answer


def _tables(connection: Any) -> set[str]:
    return set(inspect(connection).get_table_names())


async def test_up_and_down(empty_url: str) -> None:
    """Every revision goes up and down again, one by one, and `base` leaves nothing behind."""
    upgrade(empty_url)
    assert current(empty_url) == head()
    assert await _ask(empty_url, _tables) == TABLES | {"alembic_version"}

    while current(empty_url):
        downgrade(empty_url, "-1")
        upgrade(empty_url, "+1")
        downgrade(empty_url, "-1")

    assert await _ask(empty_url, _tables) == {"alembic_version"}


async def test_later_revisions_keep_what_is_there(empty_url: str) -> None:
    """A tenant and its key from the first schema are there after all later steps, up and down again."""
    moment = "'2026-01-01 00:00:00+00:00'"
    upgrade(empty_url, "0002")

    def fill(connection: Any) -> None:
        connection.exec_driver_sql(
            "INSERT INTO tenants (id, name, weight, priority, limits, suspended, created_at, updated_at) "
            f"VALUES ('acme', 'Acme', 1, 'standard', '{{}}', false, {moment}, {moment})"
        )
        connection.exec_driver_sql(
            "INSERT INTO api_keys (id, tenant_id, name, digest, pepper_version, hint, scopes, limits, created_at) "
            f"VALUES ('k', 'acme', 'K', 'd', 1, 'h', '[]', '{{}}', {moment})"
        )
        connection.commit()

    await _ask(empty_url, fill)
    for move, revision in ((upgrade, "head"), (downgrade, "0002"), (upgrade, "head")):
        move(empty_url, revision)
        for table in ("tenants", "api_keys"):
            query = f"SELECT id FROM {table}"
            rows = await _ask(empty_url, lambda connection, query=query: list(connection.exec_driver_sql(query)))
            assert len(rows) == 1


async def test_migrated_schema_is_what_the_models_say(empty_url: str) -> None:
    """Tables, columns, types, nullability, indices and constraints are those of the metadata: nothing to generate."""
    upgrade(empty_url)

    def differences(connection: Any) -> list[Any]:
        return compare_metadata(MigrationContext.configure(connection), Base.metadata)

    assert await _ask(empty_url, differences) == []
    assert set(Base.metadata.tables) == TABLES
    assert {adapters.rows.AdapterRow.metadata, tenants.models.Tenant.metadata} == {Base.metadata}


async def test_check_constraints_are_those_of_the_models(empty_url: str) -> None:
    """Checks, which the comparison above does not see, are there by name, and so are cascades."""
    upgrade(empty_url)

    def found(connection: Any) -> tuple[set[str], str]:
        inspector = inspect(connection)
        checks = {check["name"] for check in inspector.get_check_constraints("tenants")}
        return checks, inspector.get_foreign_keys("api_keys")[0]["options"]["ondelete"]

    assert await _ask(empty_url, found) == ({"ck_tenants_weight", "ck_tenants_priority"}, "CASCADE")


def test_workers_that_start_together_migrate_once(empty_url: str) -> None:
    """Four processes' worth of upgrade() at the same moment: all succeed, the schema is there once."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade, [empty_url] * 4))

    assert current(empty_url) == head()


def test_a_new_file_that_somebody_else_writes(tmp_path: Path) -> None:
    """SQLite tells who makes a file a write-ahead one "locked" at once, not after the usual wait: it is asked again."""
    path = tmp_path / "new.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, other.execute, ("COMMIT",))
        timer.start()

        upgrade(f"sqlite:///{path}")

        timer.join()
    assert current(f"sqlite:///{path}") == head()


async def test_upgrade_inside_a_running_loop(tmp_path: Path) -> None:
    """A server that migrates at start may do so while its event loop runs."""
    url = f"sqlite:///{tmp_path}/loop.db"
    assert asyncio.get_running_loop().is_running()

    upgrade(url)

    assert current(url) == head()


def test_alembic_command_line(tmp_path: Path) -> None:
    """alembic.ini serves developers: upgrade and check by URL."""
    root = Path(__file__).parents[2]
    for command in ("upgrade", "check"):
        arguments = [command, "head"] if command == "upgrade" else [command]
        url = f"url=sqlite:///{tmp_path}/cli.db"
        subprocess.run(
            [sys.executable, "-m", "alembic", "-x", url, *arguments], cwd=root, check=True, capture_output=True
        )
