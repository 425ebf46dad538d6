"""Tenants: create, change, delete, pages; limits that can't be; epochs that survive crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import func, select

from tenants.audit import AuditLog
from tenants.db import Database
from tenants.directory import TenantDirectory, TenantExists, TenantNotFound, TenantSpec
from tenants.epochs import Epochs
from tenants.keys import KeyRing, KeySpec
from tenants.limits import InvalidSettings, Limits, may_call
from tenants.models import ApiKey, EpochOutbox, Tenant
from tenants.slots import TenantSlot
from tenants.state import Client, RedisUnavailable
from tests.tenants.conftest import ADMIN


async def test_defaults(directory: TenantDirectory) -> None:
    """Only the id is required: name = id, weight 1, standard, all models, no limits, awake."""
    row = await directory.create(TenantSpec("acme"), ADMIN)
    again = await directory.get("acme")

    assert (again.name, again.weight, again.priority, again.models, again.limits) == ("acme", 1.0, "standard", None, {})
    assert again.suspended is False
    assert again.created_at == row.created_at
    assert again.created_at.utcoffset() is not None


@pytest.mark.parametrize("text", ["os.environ/DATABASE_URL", "${REDIS_URL}", "{{env}}", "%(here)s"])
async def test_values_are_never_resolved(directory: TenantDirectory, text: str) -> None:
    """AU-11: what looks like a reference to the environment is kept as the text it is."""
    await directory.create(TenantSpec("acme", name=text, models=(text,)), ADMIN)
    row = await directory.get("acme")

    assert (row.name, row.models) == (text, [text])


async def test_create_twice(directory: TenantDirectory) -> None:
    """The second of two equal ids is refused, even when both come at once; one audit entry tells of one tenant."""
    results = await asyncio.gather(
        *(directory.create(TenantSpec("acme"), ADMIN) for _ in range(5)), return_exceptions=True
    )

    assert sum(isinstance(result, Tenant) for result in results) == 1
    assert sum(isinstance(result, TenantExists) for result in results) == 4


async def test_patch_changes_only_what_is_named(directory: TenantDirectory, database: Database) -> None:
    """A patch keeps the rest, is audited with before and after, and can take limits and models away again."""
    await directory.create(TenantSpec("acme", models=("a*",), limits=Limits(concurrency=1)), ADMIN)

    await directory.patch("acme", {"weight": 2.5, "models": None, "limits": Limits()}, ADMIN)
    row = await directory.get("acme")
    entry = (await AuditLog(database).page("acme"))[0]

    assert (row.weight, row.models, row.limits, row.priority) == (2.5, None, {}, "standard")
    assert entry.action == "tenant.update"
    assert (entry.before or {})["models"] == ["a*"]
    assert (entry.after or {})["models"] is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"id": ""}, "id"), ({"id": "a/b"}, "id"), ({"id": "-a"}, "id"), ({"id": "a" * 65}, "id"),
        ({"id": "a}b"}, "id"), ({"id": "a\n"}, "id"), ({"weight": 0}, "weight"), ({"weight": -1}, "weight"),
        ({"weight": float("nan")}, "weight"), ({"weight": True}, "weight"),
        ({"priority": "urgent"}, "priority"), ({"name": "n" * 257}, "name"),
        ({"models": ("",)}, "models"), ({"suspended": 1}, "suspended"),
    ],
)  # fmt: skip
def test_impossible_tenants(values: dict[str, Any], param: str) -> None:
    """What can't be is refused with the field at fault, before anything is written."""
    with pytest.raises(InvalidSettings) as caught:
        TenantSpec(**{"id": "acme", **values})
    assert caught.value.param == param


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", 10**13])
@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_impossible_limits(name: str, value: Any) -> None:
    """Limits are null or integers from 0: negative, fractional and boolean ones are refused, unknown names too."""
    with pytest.raises(InvalidSettings) as caught:
        Limits.of({name: value})
    assert caught.value.param == f"limits.{name}"
    with pytest.raises(InvalidSettings, match="unknown"):
        Limits.of({"budget": 1})


def test_allow_lists() -> None:
    """Both lists must allow; None allows all, an empty list nothing; case matters."""
    assert may_call("llama-1", None, None)
    assert may_call("llama-1", ("x", "llama-*"), ("llama-1",))
    assert not may_call("llama-1", ("llama-*",), ("LLAMA-*",))
    assert not may_call("llama-1", None, ())


async def test_delete_takes_keys_along(directory: TenantDirectory, keys: KeyRing, database: Database) -> None:
    """Deleting a tenant deletes its keys and nobody else's; a second delete finds nothing."""
    for tenant_id in ("a", "b"):
        await directory.create(TenantSpec(tenant_id), ADMIN)
        await keys.issue(tenant_id, KeySpec("k"), ADMIN)

    await directory.delete("a", ADMIN)

    async with database.session() as session:
        assert list(await session.scalars(select(ApiKey.tenant_id))) == ["b"]
    with pytest.raises(TenantNotFound):
        await directory.delete("a", ADMIN)
    with pytest.raises(TenantNotFound):
        await directory.patch("a", {"weight": 2}, ADMIN)


async def test_pages(directory: TenantDirectory) -> None:
    """Pages follow each other in the order of ids."""
    for tenant_id in ("c", "a", "b"):
        await directory.create(TenantSpec(tenant_id), ADMIN)

    first, has_more = await directory.page(limit=2)
    rest, has_no_more = await directory.page(after="b", limit=2)

    assert [row.id for row in first + rest] == ["a", "b", "c"]
    assert (has_more, has_no_more) == (True, False)


async def test_parallel_patches_lose_nothing(directory: TenantDirectory) -> None:
    """Patches of different fields at the same time are all there in the end."""
    await directory.create(TenantSpec("acme"), ADMIN)

    await asyncio.gather(
        directory.patch("acme", {"weight": 7}, ADMIN), directory.patch("acme", {"name": "Acme"}, ADMIN),
        directory.patch("acme", {"priority": "batch"}, ADMIN), directory.patch("acme", {"models": ("m",)}, ADMIN),
    )  # fmt: skip
    row = await directory.get("acme")

    assert (row.weight, row.name, row.priority, row.models) == (7.0, "Acme", "batch", ["m"])


async def test_epoch_moves_after_commit_only(directory: TenantDirectory, epochs: Epochs) -> None:
    """A committed change moves the tenant's epoch and no other's; one that is rolled back moves nothing."""
    for tenant_id in ("a", "b"):
        await directory.create(TenantSpec(tenant_id), ADMIN)
    before = [await epochs.get("a"), await epochs.get("b")]

    with pytest.raises(ZeroDivisionError):
        async with epochs.change("a"):
            _ = 1 / 0
    assert [await epochs.get("a"), await epochs.get("b")] == before
    async with epochs.change("a"):
        pass

    assert await epochs.get("a") > before[0]
    assert await epochs.get("b") == before[1]


async def test_change_of_all_moves_every_tenant(directory: TenantDirectory, epochs: Epochs) -> None:
    """What all tenants share moves the epoch of each."""
    for tenant_id in ("a", "b", "c"):
        await directory.create(TenantSpec(tenant_id), ADMIN)
    before = [await epochs.get(tenant_id) for tenant_id in "abc"]

    async with epochs.change_all():
        pass

    assert all([await epochs.get(tenant_id) > old for tenant_id, old in zip("abc", before, strict=True)])


async def test_crash_between_commit_and_move_is_repaired(
    directory: TenantDirectory, epochs: Epochs, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that dies (or loses Redis) after its commit leaves an outbox row; the next repair moves the epoch."""
    await directory.create(TenantSpec("acme"), ADMIN)
    before = await epochs.get("acme")

    async def away(_redis: object, _tenant_ids: object) -> None:
        raise RedisUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr("tenants.epochs.move", away)
        await directory.patch("acme", {"suspended": True}, ADMIN)
    assert await epochs.get("acme") == before

    assert await epochs.repair() == 1
    assert await epochs.get("acme") > before
    assert await epochs.repair() == 0
    async with database.session() as session:
        assert await session.scalar(select(func.count()).select_from(EpochOutbox)) == 0


async def test_lost_epoch_starts_above_every_old_one(directory: TenantDirectory, epochs: Epochs, redis: Client) -> None:
    """After FLUSHALL an epoch is new: a principal read before can never look current again."""
    await directory.create(TenantSpec("acme"), ADMIN)
    async with epochs.change("acme"):
        pass
    before = await epochs.get("acme")

    await redis.delete(TenantSlot("acme").epoch)

    assert await epochs.get("acme") > before
