"""Keys of administrators, with a role each; and the key of the settings, which counts until an admin switches it off.

    viewer      reads                 operator      also changes tenants, keys, plans, adapters
    admin       also admin keys and keys that act for any tenant

AdminKeyNotFound    no such admin key
LastAdminKey        it is the one that is asked with, or nobody would be admin any more
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.audit import Act, Actor
from tenants.db import Database, StateUnavailable, now
from tenants.epochs import Epochs
from tenants.key_format import ADMIN_PREFIX, Pepper, make_key, public_id, sha256_of
from tenants.limits import InvalidSettings, check_name
from tenants.models import AdminKey

ROLES = {"viewer": 0, "operator": 1, "admin": 2}
SETTINGS_KEY = "settings"
"""The id of the key that comes from the settings; its row says when it was switched off."""
EVERYONE = ""
"""Admin keys belong to no tenant; their epoch is that of this id."""


class AdminKeyNotFound(LookupError):
    """There is no such admin key."""


class LastAdminKey(Exception):
    """Nobody would be left to undo it."""


@dataclass(frozen=True)
class AdminKeySpec:
    """What a new admin key is asked to be. Raises InvalidSettings."""

    name: str
    role: str
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.role not in ROLES:
            raise InvalidSettings(f"role must be one of {', '.join(ROLES)}", "role")


@dataclass(frozen=True)
class Administrator:
    """Who asks. `epoch` and `generation` of Redis when this was read."""

    key_id: str
    name: str
    role: str
    digest: str
    pepper_version: int
    expires_at: datetime | None
    is_revoked: bool
    epoch: int
    generation: int

    @property
    def is_good(self) -> bool:
        return not self.is_revoked and (self.expires_at is None or self.expires_at > now())

    @property
    def actor(self) -> str:
        """What the audit log calls them."""
        return "admin" if self.key_id == SETTINGS_KEY else f"admin:{self.name}"


class AdminKeyRing:
    """All admin keys, read anew whenever one of them has changed."""

    def __init__(self, database: Database, redis: Any, pepper: Pepper, settings_key: str) -> None:
        self._database = database
        self._redis = redis
        self._epochs = Epochs(database, redis)
        self._pepper = pepper
        self._settings_sha256 = hashlib.sha256(settings_key.encode("utf-8", "surrogateescape")).digest()
        self._has_settings_key = bool(settings_key)
        self._known: dict[str, Administrator] = {}

    async def authenticate(self, key: str) -> Administrator | None:
        """None if it is no admin key, or no longer one. While Redis or SQL is away, what was last known counts.

        Raises RedisUnavailable, DatabaseUnavailable.
        """
        sha256 = sha256_of(key)
        is_settings_key = self._has_settings_key and hmac.compare_digest(sha256, self._settings_sha256)
        key_id = SETTINGS_KEY if is_settings_key else public_id(key, ADMIN_PREFIX)
        if key_id is None:
            return None
        found = await self._current(key_id)
        if found is None or not found.is_good:
            return None
        if not is_settings_key and not self._pepper.opens(found.digest, found.pepper_version, sha256):
            return None
        return found

    async def create(self, spec: AdminKeySpec, actor: Actor) -> tuple[AdminKey, str]:
        """→ the row, and the key, which is shown now and never again."""
        key_id, key = make_key(ADMIN_PREFIX)
        version, digest = self._pepper.seal(sha256_of(key))
        row = AdminKey(
            id=key_id, name=spec.name, role=spec.role, digest=digest, pepper_version=version, hint=key[-4:],
            expires_at=spec.expires_at, created_at=now(),
        )  # fmt: skip
        async with self._database.begin() as session:
            session.add(row)
            await session.flush()
            audit.append(session, actor, Act("admin_key.create", target=key_id, after=describe(row)))
        return row, key

    async def page(self, after: str | None = None, limit: int = 100) -> tuple[list[AdminKey], bool]:
        """In the order of ids; revoked ones with their date. That of the settings is there once it was switched."""
        return await self._database.page(select(AdminKey), AdminKey.id, after, limit)

    async def revoke(self, key_id: str, caller: Administrator, actor: Actor) -> AdminKey:
        """Acts at the next request on every worker. `caller` can't revoke its own key, so that one admin remains.

        Raises AdminKeyNotFound, LastAdminKey.
        """
        if key_id == caller.key_id:
            raise LastAdminKey("a key can't revoke itself: use another admin key")
        async with self._epochs.change(EVERYONE) as session:
            mine = await session.get(AdminKey, caller.key_id, with_for_update=True)
            if mine.revoked_at is not None if mine else caller.key_id != SETTINGS_KEY:
                raise LastAdminKey("this key was revoked meanwhile")
            row = await self._find(session, key_id)
            if row.revoked_at is None:
                before, row.revoked_at = describe(row), now()
                await session.flush()
                audit.append(session, actor, Act("admin_key.revoke", "", key_id, before, describe(row)))
        return row

    async def restore_settings_key(self, actor: Actor) -> None:
        """The key of the settings counts again."""
        async with self._epochs.change(EVERYONE) as session:
            row = await self._find(session, SETTINGS_KEY)
            if row.revoked_at is not None:
                before, row.revoked_at = describe(row), None
                await session.flush()
                audit.append(session, actor, Act("admin_key.restore", "", SETTINGS_KEY, before, describe(row)))

    async def _current(self, key_id: str) -> Administrator | None:
        known = self._known.get(key_id)
        try:
            epoch, generation = await self._epochs.get(EVERYONE), self._redis.generation
            if known is not None and (known.epoch, known.generation) == (epoch, generation):
                return known
            async with self._database.session() as session:
                row = await session.get(AdminKey, key_id)
        except StateUnavailable:
            if known is None:
                raise
            return known
        if row is None and key_id != SETTINGS_KEY:
            self._known.pop(key_id, None)
            return None
        row = row or _settings_row()
        self._known[key_id] = found = Administrator(
            key_id, row.name, row.role, row.digest, row.pepper_version, row.expires_at, row.revoked_at is not None,
            epoch, generation,
        )  # fmt: skip
        return found

    async def _find(self, session: AsyncSession, key_id: str) -> AdminKey:
        row = await session.get(AdminKey, key_id, with_for_update=True)
        if row is None and key_id == SETTINGS_KEY:
            row = _settings_row()
            session.add(row)
        if row is None:
            raise AdminKeyNotFound(f"there is no admin key {key_id[:64]!r}")
        return row


def _settings_row() -> AdminKey:
    return AdminKey(
        id=SETTINGS_KEY, name="CHORUS_ADMIN_KEY", role="admin", digest="", pepper_version=0, hint="", created_at=now()
    )


def describe(row: AdminKey) -> dict[str, Any]:
    """The key as the audit log keeps it: nothing secret."""
    return {
        "id": row.id, "name": row.name, "role": row.role, "hint": row.hint,
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(),
    }  # fmt: skip
