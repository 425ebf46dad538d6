"""How long a usage report takes with many rows in the ledger: python -m bench.usage_report [--rows N] [--database URL].

Fills the ledger with generated attempts of 200 tenants, 2 keys and 3 models each, over 90 days, and asks for reports as
GET /admin/v1/usage does. Without --database in a fresh SQLite file (about 0.4 kB per row).
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from sqlalchemy import text

import migrations
from tenants.db import Database
from tenants.usage import Group, UsageLedger, UsageQuery

FIRST = "2026-01-01"
BATCH = 250_000
NUMBERS = {
    "sqlite": (
        "WITH RECURSIVE n(i) AS (SELECT {start} UNION ALL SELECT i + 1 FROM n WHERE i < {end} - 1)",
        "date('{first}', '+' || (i % 90) || ' days')",
        "strftime('%Y-%m-%d %H:%M:%S.000000', '{first}', '+' || (i % 90) || ' days', '+' || (i % 86400) || ' seconds')",
    ),
    "postgresql": (
        "WITH n(i) AS (SELECT generate_series({start}, {end} - 1))",
        "date '{first}' + (i % 90)::int",
        "timestamptz '{first} 00:00:00+00' + (i % 90) * interval '1 day' + (i % 86400) * interval '1 second'",
    ),
}
FILL = """
INSERT INTO usage_entries (attempt_id, request_id, tenant_id, key_id, model, adapter, endpoint, status, prompt_tokens,
    cached_tokens, completion_tokens, "user", day, created_at)
{numbers} SELECT 'a' || i, 'req_' || i, 't' || (i / 7 % 200), 'k' || (i / 7 % 400), 'm' || (i / 3 % 3), '',
    'chat/completions', 'ok', 100, 0, i % 300, '', {day}, {at} FROM n
"""


def fill_sqlite(path: str, batches: Sequence[str]) -> None:
    """Without any care for crashes: it is only to be there."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000"):
            connection.execute(f"PRAGMA {pragma}")
        for batch in batches:
            connection.execute(batch)


async def run(url: str, rows: int) -> None:
    migrations.upgrade(url, "0004")
    database = Database(url)
    started = time.monotonic()
    dialect = NUMBERS["sqlite" if database.is_sqlite else "postgresql"]
    batches = [
        FILL.format(**dict(zip(("numbers", "day", "at"), [part.format(**chosen) for part in dialect], strict=True)))
        for start in range(0, rows, BATCH)
        for chosen in [{"start": start, "end": min(rows, start + BATCH), "first": FIRST}]
    ]
    if database.is_sqlite:
        fill_sqlite(url.partition("///")[2], batches)
    for batch in () if database.is_sqlite else batches:
        async with database.engine.begin() as connection:
            await connection.execute(text(batch))
    print(f"{rows} rows written in {time.monotonic() - started:.1f} s")
    started = time.monotonic()
    migrations.upgrade(url)
    print(f"summed up per day, once, in {time.monotonic() - started:.1f} s")
    ledger = UsageLedger(database)
    month = UsageQuery(start=datetime(2026, 2, 1, tzinfo=UTC), end=datetime(2026, 3, 1, tzinfo=UTC))
    reports: list[tuple[str, UsageQuery, list[Group]]] = [
        ("everything", UsageQuery(), []),
        ("everything by day and model", UsageQuery(), ["day", "model"]),
        ("a month by tenant", month, ["tenant"]),
        ("one tenant by day, model and key", UsageQuery(tenant_id="t7"), ["day", "key", "model"]),
        ("all tenants by day, model and key", UsageQuery(), ["day", "key", "model"]),
    ]
    assert {name for _, _, groups in reports for name in groups} <= set(get_args(Group))
    for name, query, groups in reports:
        started, worked = time.monotonic(), time.process_time()
        found = await ledger.sums(query, groups)
        took_ms, own_ms = (time.monotonic() - started) * 1000, (time.process_time() - worked) * 1000
        print(f"{name}: {len(found)} groups in {took_ms:.0f} ms, of it {own_ms:.0f} ms of CPU here")
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--database", default="")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(chosen.database or f"sqlite:///{Path(directory)}/usage.db", chosen.rows))


if __name__ == "__main__":
    main()
