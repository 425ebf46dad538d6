"""How long a usage report takes with many rows in the ledger: python -m bench.usage_report [--rows N] [--database URL].

Fills the ledger with generated attempts of 200 tenants, 2 keys and 3 models each, over 90 days, and asks for reports as
GET /admin/v1/usage does. Without --database in a fresh SQLite file (about 0.4 kB per row).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from sqlalchemy import text

import migrations
from tenants.db import Database
from tenants.usage import Group, UsageLedger, UsageQuery

FIRST = "2026-01-01"
NUMBERS = {
    "sqlite": (
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows} - 1)",
        "date('{first}', '+' || (i % 90) || ' days')",
        "strftime('%Y-%m-%d %H:%M:%S.000000', '{first}', '+' || (i % 90) || ' days', '+' || (i % 86400) || ' seconds')",
    ),
    "postgresql": (
        "WITH n(i) AS (SELECT generate_series(0, {rows} - 1))",
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


async def run(url: str, rows: int) -> None:
    migrations.upgrade(url, "0004")
    database = Database(url)
    numbers, day, at = (
        part.format(rows=rows, first=FIRST) for part in NUMBERS["sqlite" if database.is_sqlite else "postgresql"]
    )
    started = time.monotonic()
    async with database.engine.begin() as connection:
        await connection.execute(text(FILL.format(numbers=numbers, day=day, at=at)))
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
        started = time.monotonic()
        found = await ledger.sums(query, groups)
        print(f"{name}: {len(found)} groups in {(time.monotonic() - started) * 1000:.0f} ms")
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
