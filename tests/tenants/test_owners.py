"""Owners: the names of tenants' KV blocks end when what they were made for ends."""

from __future__ import annotations

import time

from tenants.db import Database
from tenants.directory import TenantDirectory, TenantSpec
from tenants.epochs import Epochs
from tenants.key_format import Pepper
from tenants.owners import OwnerBook, owner_of
from tenants.state import Client
from tests.tenants.conftest import ADMIN

HOUR = 3600


async def test_one_name_for_each_tenant_and_retention(database: Database, redis: Client) -> None:
    """Of 16 bytes, equal for all workers with this pepper and no others; another one after each change of the retention
    and after the tenant was deleted and made again, none for a tenant that is gone."""
    directory = TenantDirectory(database, Epochs(database, redis))
    book, now = OwnerBook(database, Pepper({1: b"p" * 32})), time.time()
    seen: set[bytes] = set()

    async def is_new() -> bool:
        [owner] = await book.owners(now)
        assert len(owner) == 16
        is_new = owner not in seen
        seen.add(owner)
        return is_new

    await directory.create(TenantSpec(id="a"), ADMIN)
    assert await is_new()
    assert not await is_new()
    await directory.patch("a", {"name": "other"}, ADMIN)
    assert not await is_new()
    for retention in (1, "none", 2):
        await directory.patch("a", {"retention": retention}, ADMIN)
        assert await is_new()
    await directory.delete("a", ADMIN)
    assert await book.owners(now) == []
    await directory.create(TenantSpec(id="a", retention=2), ADMIN)
    assert await is_new()
    assert await OwnerBook(database, Pepper({1: b"q" * 32})).owners(now) != await book.owners(now)


async def test_hours_end_a_name() -> None:
    """Under a retention of hours no name is older than that; without one, and with "none", it stays."""
    for hours in (1, 5):
        names = [owner_of("salt", hours * HOUR, second) for second in range(0, 20 * HOUR, HOUR // 4)]
        assert len(set(names)) == 20 // hours
        assert all(names.count(name) == hours * 4 for name in names)
    for retention_s in (None, 0):
        assert len({owner_of("salt", retention_s, second) for second in (0, 1e6, 1e9)}) == 1
    assert owner_of("salt", None, 0) != owner_of("other", None, 0)
