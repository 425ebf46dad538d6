"""Keys: their form, what is stored, who is let in, and that every change acts at the next request of every worker."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text

from tenants.audit import AuditLog
from tenants.db import Database
from tenants.directory import TenantDirectory, TenantNotFound, TenantSpec
from tenants.epochs import Epochs
from tenants.key_format import Pepper, checksum, make_key, public_id
from tenants.keys import InvalidKey, KeyNotFound, KeyRing, KeySpec, TenantSuspended
from tenants.limits import InvalidSettings, Limits
from tenants.quotas import Quotas, Stale
from tenants.slots import TenantSlot
from tenants.state import Client, connect
from tests.services import RedisServer
from tests.tenants.conftest import ADMIN, PEPPER
from tests.tenants.worker import attempt

BASE62 = string.digits + string.ascii_letters


@pytest.fixture
async def other_worker(database_url: str, redis_url: str) -> AsyncIterator[KeyRing]:
    """A second worker: its own connections and caches."""
    database, redis = Database(database_url), connect(redis_url)
    yield KeyRing(database, redis, PEPPER)
    await redis.aclose()
    await database.close()


@asynccontextmanager
async def statements(database: Database) -> AsyncIterator[list[str]]:
    """The SQL that runs inside the block."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        seen.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    yield seen
    event.remove(database.engine.sync_engine, "before_cursor_execute", note)


@given(st.integers(0, 77), st.sampled_from(BASE62))
def test_typo_is_rejected_by_form(position: int, letter: str) -> None:
    """Any single changed character makes a key malformed: no lookup is needed to refuse it."""
    key_id, key = make_key()
    assert public_id(key) == key_id

    wrong = key[:position] + letter + key[position + 1 :]

    assert wrong == key or public_id(wrong) is None


@pytest.mark.parametrize(
    "key", ["", "x", "chorus_live_", "sk-abc", "chorus_live_" + "a" * 16 + "_" + "b" * 43 + "_000000", "chorus_é", "\0"]
)
async def test_malformed_key_needs_no_io(keys: KeyRing, database: Database, redis: Client, key: str) -> None:
    """AU-01: garbage and typos are refused before SQL or Redis are asked."""
    await database.close()
    async with statements(database) as seen:
        with pytest.raises(InvalidKey):
            await keys.authenticate(key)
    assert seen == []
    assert redis.generation == 0


async def test_principal_carries_what_a_request_needs(directory: TenantDirectory, keys: KeyRing) -> None:
    """Tenant, key, scopes, both limits, both allow-lists, weight, priority and salt come from the rows."""
    await directory.create(
        TenantSpec("acme", weight=3, priority="interactive", models=("llama-*",), limits=Limits(concurrency=4)), ADMIN
    )
    spec = KeySpec("prod", ("inference", "adapters:write"), Limits(requests_per_minute=0), ("llama-1",))
    issued = await keys.issue("acme", spec, ADMIN)

    principal = await keys.authenticate(issued.key)

    assert (principal.tenant_id, principal.key_id) == ("acme", issued.row.id)
    assert principal.scopes == {"inference", "adapters:write"}
    assert principal.tenant_limits == Limits(concurrency=4)
    assert principal.key_limits == Limits(requests_per_minute=0)
    assert (principal.models, principal.key_models) == (("llama-*",), ("llama-1",))
    assert (principal.lane_weight, principal.priority) == (3.0, 0)
    assert len(principal.cache_salt) == 32


async def test_nothing_secret_is_stored(directory: TenantDirectory, keys: KeyRing, database: Database) -> None:
    """Neither the key nor its secret nor its plain hash is in any table, the audit log included."""
    await directory.create(TenantSpec("acme"), ADMIN)
    issued = await keys.issue("acme", KeySpec("prod"), ADMIN)
    secret = issued.key.split("_")[3]

    async with database.session() as session:
        rows = [
            list(await session.execute(text(f"SELECT * FROM {table}")))
            for table in ("api_keys", "audit_entries", "tenants")
        ]
    dump = str(rows)

    assert issued.row.id in dump
    assert secret not in dump
    assert issued.key not in dump


async def test_warm_key_needs_no_sql(directory: TenantDirectory, keys: KeyRing, database: Database) -> None:
    """The hot path asks SQL nothing; a hold() that checks the epoch itself spares Redis too."""
    await directory.create(TenantSpec("acme"), ADMIN)
    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    first = await keys.authenticate(key)

    async with statements(database) as seen:
        assert await keys.authenticate(key) is first
        assert await keys.authenticate(key, check_epoch=False) is first

    assert seen == []


async def test_wrong_secret_of_a_real_id(directory: TenantDirectory, keys: KeyRing) -> None:
    """A public id alone opens nothing, before and after the true key was cached."""
    await directory.create(TenantSpec("acme"), ADMIN)
    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    body = f"chorus_live_{key.split('_')[2]}_{make_key()[1].split('_')[3]}"
    forged = f"{body}_{checksum(body)}"
    assert public_id(forged) == public_id(key)

    for _ in range(2):
        with pytest.raises(InvalidKey):
            await keys.authenticate(forged)
        await keys.authenticate(key)


async def test_revocation_acts_at_once_everywhere(
    directory: TenantDirectory, keys: KeyRing, other_worker: KeyRing
) -> None:
    """QB-04: a key that is warm on two workers is unknown to both right after its revocation; others still work."""
    await directory.create(TenantSpec("acme"), ADMIN)
    gone = await keys.issue("acme", KeySpec("gone"), ADMIN)
    stays = await keys.issue("acme", KeySpec("stays"), ADMIN)
    for ring in (keys, other_worker):
        await ring.authenticate(gone.key)
        await ring.authenticate(stays.key)

    await keys.revoke("acme", gone.row.id, ADMIN)

    for ring in (other_worker, keys, other_worker):
        with pytest.raises(InvalidKey):
            await ring.authenticate(gone.key)
        await ring.authenticate(stays.key)


async def test_suspension_and_limits_act_at_once(
    directory: TenantDirectory, keys: KeyRing, other_worker: KeyRing
) -> None:
    """QB-04: suspending a tenant, waking it and changing its limits act at the next request of another worker."""
    await directory.create(TenantSpec("acme"), ADMIN)
    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    await other_worker.authenticate(key)

    await directory.patch("acme", {"suspended": True}, ADMIN)
    with pytest.raises(TenantSuspended):
        await other_worker.authenticate(key)
    await directory.patch("acme", {"suspended": False, "limits": Limits(concurrency=1)}, ADMIN)

    assert (await other_worker.authenticate(key)).tenant_limits == Limits(concurrency=1)


async def test_restarted_redis_revives_nothing(sqlite_url: str, own_redis: RedisServer) -> None:
    """QB-04: a Redis that comes back with an epoch from before a revocation does not bring the key back, not even on a
    worker that was idle meanwhile."""
    database, writer, idle = Database(sqlite_url), connect(own_redis.url), connect(own_redis.url)
    epochs = Epochs(database, writer)
    await TenantDirectory(database, epochs).create(TenantSpec("acme"), ADMIN)
    ring, idle_ring = KeyRing(database, writer, PEPPER), KeyRing(database, idle, PEPPER)
    issued = await ring.issue("acme", KeySpec("prod"), ADMIN)
    principal = await idle_ring.authenticate(issued.key)

    await ring.revoke("acme", issued.row.id, ADMIN)
    await writer.set(TenantSlot("acme").epoch, principal.epoch)
    own_redis.kill()
    own_redis.start()

    with pytest.raises(Stale):
        await Quotas(idle).hold(principal, attempt("a", key_id=principal.key_id), 1)
    with pytest.raises(InvalidKey):
        await idle_ring.authenticate(issued.key)
    for client in (writer, idle):
        await client.aclose()
    await database.close()


async def test_suspension_ends_for_metered_requests(
    directory: TenantDirectory, keys: KeyRing, other_worker: KeyRing
) -> None:
    """A suspended tenant that wakes up is let in at its next request, also where hold() would check the epoch."""
    await directory.create(TenantSpec("acme", suspended=True), ADMIN)
    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    with pytest.raises(TenantSuspended):
        await other_worker.authenticate(key, check_epoch=False)

    await directory.patch("acme", {"suspended": False}, ADMIN)

    assert (await other_worker.authenticate(key, check_epoch=False)).tenant_id == "acme"


async def test_deleted_tenant_and_its_namesake(
    directory: TenantDirectory, keys: KeyRing, other_worker: KeyRing
) -> None:
    """Keys die with their tenant, on every worker, and do not rise with a new tenant of the same id."""
    await directory.create(TenantSpec("acme"), ADMIN)
    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    await other_worker.authenticate(key)

    await directory.delete("acme", ADMIN)
    with pytest.raises(InvalidKey):
        await other_worker.authenticate(key)
    await directory.create(TenantSpec("acme"), ADMIN)

    with pytest.raises(InvalidKey):
        await other_worker.authenticate(key)
    new = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key
    assert (await other_worker.authenticate(new)).tenant_id == "acme"


async def test_new_key_works_after_it_was_guessed(directory: TenantDirectory, keys: KeyRing) -> None:
    """QB-04: being asked for a key before it exists leaves no trace that blocks it later."""
    await directory.create(TenantSpec("acme"), ADMIN)
    with pytest.raises(InvalidKey):
        await keys.authenticate(make_key()[1])

    key = (await keys.issue("acme", KeySpec("prod"), ADMIN)).key

    assert (await keys.authenticate(key)).tenant_id == "acme"


async def test_expiry_is_a_moment(directory: TenantDirectory, keys: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    """QB-14: a key expires at its own moment, whatever the time zone it was given in, cached or not."""
    await directory.create(TenantSpec("acme"), ADMIN)
    end = datetime(2026, 1, 31, 23, 30, tzinfo=timezone(timedelta(hours=-5))) + timedelta(days=30)
    key = (await keys.issue("acme", KeySpec("month", expires_at=end), ADMIN)).key

    monkeypatch.setattr("tenants.keys.now", lambda: end.astimezone(UTC) - timedelta(microseconds=1))
    await keys.authenticate(key)
    monkeypatch.setattr("tenants.keys.now", lambda: end.astimezone(UTC))
    with pytest.raises(InvalidKey):
        await keys.authenticate(key)
    past = (await keys.issue("acme", KeySpec("past", expires_at=end - timedelta(days=1)), ADMIN)).key
    with pytest.raises(InvalidKey):
        await keys.authenticate(past)


async def test_keys_of_other_tenants_are_unknown(directory: TenantDirectory, keys: KeyRing) -> None:
    """A key is shown to, listed for and revoked by its own tenant only."""
    for tenant_id in ("a", "b"):
        await directory.create(TenantSpec(tenant_id), ADMIN)
    issued = await keys.issue("a", KeySpec("prod"), ADMIN)

    with pytest.raises(KeyNotFound):
        await keys.revoke("b", issued.row.id, ADMIN)
    with pytest.raises(KeyNotFound):
        await keys.get("b", issued.row.id)
    assert await keys.page("b") == ([], False)
    assert (await keys.authenticate(issued.key)).tenant_id == "a"


async def test_pages_of_keys(directory: TenantDirectory, keys: KeyRing) -> None:
    """Pages follow each other without gaps or repeats, and say whether there is more."""
    await directory.create(TenantSpec("acme"), ADMIN)
    ids = sorted([(await keys.issue("acme", KeySpec(f"k{i}"), ADMIN)).row.id for i in range(5)])

    first, has_more = await keys.page("acme", limit=3)
    rest, has_no_more = await keys.page("acme", after=first[-1].id, limit=3)

    assert [row.id for row in first + rest] == ids
    assert (has_more, has_no_more) == (True, False)


async def test_acts_are_audited(directory: TenantDirectory, keys: KeyRing, database: Database) -> None:
    """Creating and revoking a key leave entries with actor, request, before and after; a second revoke leaves none."""
    await directory.create(TenantSpec("acme"), ADMIN)
    issued = await keys.issue("acme", KeySpec("prod"), ADMIN)
    await keys.revoke("acme", issued.row.id, ADMIN)
    await keys.revoke("acme", issued.row.id, ADMIN)

    revoked, created, tenant = await AuditLog(database).page("acme")

    assert [entry.action for entry in (tenant, created, revoked)] == ["tenant.create", "key.create", "key.revoke"]
    assert {(entry.actor, entry.request_id) for entry in (created, revoked)} == {("admin", "req_1")}
    assert created.after is not None
    assert created.after["name"] == "prod"
    assert (revoked.before or {})["revoked_at"] is None
    assert (revoked.after or {})["revoked_at"] is not None


async def test_impossible_keys_are_refused(keys: KeyRing, directory: TenantDirectory) -> None:
    """Unknown scopes, no scopes, naive expiry, unknown tenants: refused with the field at fault."""
    wrong_values: list[dict[str, Any]] = [
        {"scopes": ("admin",)}, {"scopes": ()}, {"name": ""}, {"expires_at": datetime(2030, 1, 1)}, {"models": ("",)},
    ]  # fmt: skip
    for wrong in wrong_values:
        with pytest.raises(InvalidSettings) as caught:
            KeySpec(**{"name": "k", **wrong})
        assert [caught.value.param] == list(wrong)
    with pytest.raises(TenantNotFound):
        await keys.issue("nobody", KeySpec("k"), ADMIN)


async def test_peppers_rotate(directory: TenantDirectory, database: Database, redis: Client, keys: KeyRing) -> None:
    """Keys sealed with an old pepper work as long as it is kept; without it they are unknown, not an error."""
    await directory.create(TenantSpec("acme"), ADMIN)
    old = (await keys.issue("acme", KeySpec("old"), ADMIN)).key
    rotated = KeyRing(database, redis, f"{PEPPER},2:another-one")
    new = await rotated.issue("acme", KeySpec("new"), ADMIN)

    assert new.row.pepper_version == 2
    assert (await rotated.authenticate(old)).cache_salt == (await keys.authenticate(old)).cache_salt
    await rotated.authenticate(new.key)
    with pytest.raises(InvalidKey):
        await KeyRing(database, redis, "2:another-one").authenticate(old)


def test_pepper_shows_nothing() -> None:
    """A pepper never appears in a repr, and an empty one is refused."""
    assert "secret" not in repr(Pepper.parse("1:secret")).replace("secrets", "")
    for text_ in ("", "1:,2:x"):
        with pytest.raises(ValueError, match="pepper"):
            Pepper.parse(text_)
