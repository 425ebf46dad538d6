"""Run by Alembic: hands it our tables and a connection, that of the caller or (for developers) of `-x url=…`."""

from __future__ import annotations

import asyncio
from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection

import adapters.rows
import tenants.models
from tenants.db import Base, make_engine


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_by_url(url: str) -> None:
    engine = make_engine(url, statement_s=None)
    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


assert {adapters.rows.AdapterRow.metadata, tenants.models.Tenant.metadata} == {Base.metadata}
if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name)
given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_by_url(context.get_x_argument(as_dictionary=True)["url"]))
