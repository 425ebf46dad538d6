"""Keys of administrators: roles, revocation on every worker, switching off the key of the settings, outages."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tenants.admin_keys import SETTINGS_KEY, Administrator, AdminKeyNotFound, AdminKeyRing, AdminKeySpec, LastAdminKey
from tenants.audit import AuditLog
from tenants.db import Database, now
from tenants.key_format import Pepper
from tenants.limits import InvalidSettings
from tenants.state import Client, RedisUnavailable
from tests.services import RedisServer
from tests.tenants.conftest import ADMIN, PEPPER

KEY = "any string of sixteen or more"


def make_ring(database: Database, redis: Client) -> AdminKeyRing:
    return AdminKeyRing(database, redis, Pepper.parse(PEPPER), KEY)


@pytest.fixture
def ring(database: Database, redis: Client) -> AdminKeyRing:
    return make_ring(database, redis)


@pytest.fixture
def other_worker(database: Database, redis: Client) -> AdminKeyRing:
    return make_ring(database, redis)


async def known(ring: AdminKeyRing, key: str) -> Administrator:
    found = await ring.authenticate(key)
    assert found is not None
    return found


async def test_life_of_an_admin_key(ring: AdminKeyRing, other_worker: AdminKeyRing, database: Database) -> None:
    """Made with a role and a name that the audit log shows; revoked, it is unknown on every worker at once."""
    row, key = await ring.create(AdminKeySpec("Ann", "operator"), ADMIN)
    found = await known(other_worker, key)
    assert (found.role, found.actor, found.key_id) == ("operator", "admin:Ann", row.id)
    assert key not in repr(row.__dict__)

    await ring.revoke(row.id, await known(ring, KEY), ADMIN)

    assert await ring.authenticate(key) is None
    assert await other_worker.authenticate(key) is None
    assert [entry.action for entry in await AuditLog(database).page()] == ["admin_key.revoke", "admin_key.create"]


async def test_the_key_of_the_settings(ring: AdminKeyRing, other_worker: AdminKeyRing) -> None:
    """It has role admin, can't switch itself off, is switched off by another admin on every worker, and on again."""
    settings_key = await known(ring, KEY)
    assert (settings_key.role, settings_key.actor) == ("admin", "admin")
    await known(other_worker, KEY)
    with pytest.raises(LastAdminKey):
        await ring.revoke(SETTINGS_KEY, settings_key, ADMIN)
    _, key = await ring.create(AdminKeySpec("Ann", "admin"), ADMIN)
    ann = await known(ring, key)

    await ring.revoke(SETTINGS_KEY, ann, ADMIN)
    assert await ring.authenticate(KEY) is None
    assert await other_worker.authenticate(KEY) is None
    with pytest.raises(LastAdminKey):
        await ring.revoke(ann.key_id, ann, ADMIN)
    with pytest.raises(LastAdminKey):
        await other_worker.revoke(ann.key_id, settings_key, ADMIN)

    await ring.restore_settings_key(ADMIN)
    assert (await known(other_worker, KEY)).role == "admin"


@pytest.mark.parametrize(
    "key", ["", "chorus_admin_", KEY + "x", "chorus_live_" + "a" * 16 + "_" + "b" * 43 + "_000000"]
)
async def test_what_is_no_admin_key(ring: AdminKeyRing, key: str) -> None:
    """Strangers, typos and tenants' keys are none."""
    assert await ring.authenticate(key) is None


async def test_expired_and_forged(ring: AdminKeyRing) -> None:
    """An expired key is none, and neither is one with the id of another key."""
    _, key = await ring.create(AdminKeySpec("old", "admin", now() - timedelta(seconds=1)), ADMIN)
    assert await ring.authenticate(key) is None
    _, good = await ring.create(AdminKeySpec("good", "admin"), ADMIN)
    forger = AdminKeyRing(ring._database, ring._redis, Pepper.parse("1:another"), KEY)
    assert await forger.authenticate(good) is None
    with pytest.raises(InvalidSettings):
        AdminKeySpec("x", "root")
    with pytest.raises(AdminKeyNotFound):
        await ring.revoke("nobody", await known(ring, KEY), ADMIN)


async def test_while_redis_is_away(database: Database, own_redis: RedisServer) -> None:
    """Who was known goes on, so that an admin can look; who was not is neither let in nor refused."""
    from tenants.state import connect

    redis = connect(own_redis.url)
    ring = make_ring(database, redis)
    await known(ring, KEY)
    own_redis.kill()

    assert (await known(ring, KEY)).role == "admin"
    with pytest.raises(RedisUnavailable):
        await make_ring(database, redis).authenticate(KEY)
    await redis.aclose()
