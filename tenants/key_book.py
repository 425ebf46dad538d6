"""KeyBook: the keys of tenants as administrators see them: issue, import, rotate, change, list, revoke. Each act and
its audit entry are one transaction. Knows nothing of requests.

KeyNotFound         the tenant has no such key, or it has ended
KeyExists           this key was imported before
MayNotGrant         the key would have more rights than who makes it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.addresses import check_addresses
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.directory import TenantNotFound
from tenants.epochs import Epochs
from tenants.key_format import Pepper, make_key, sha256_of
from tenants.limits import InvalidSettings, Limits, check_models, check_name
from tenants.models import ApiKey, Tenant

SCOPES = frozenset({"inference", "adapters:write", "act_as"})


class KeyNotFound(LookupError):
    """The tenant has no such key, or it has ended."""


class KeyExists(Exception):
    """This key was imported before."""


class MayNotGrant(Exception):
    """Nobody makes a key with more rights than their own: for any tenant acts only who is admin."""


@dataclass(frozen=True)
class KeySpec:
    """What a new key is asked to be. Raises InvalidSettings."""

    name: str
    scopes: tuple[str, ...] = ("inference",)
    limits: Limits = field(default_factory=Limits)
    models: tuple[str, ...] | None = None
    expires_at: datetime | None = None
    allowed_ips: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_models(self.models)
        check_addresses(self.allowed_ips)
        if not self.scopes or not set(self.scopes) <= SCOPES:
            raise InvalidSettings(f"scopes must be one or more of {', '.join(sorted(SCOPES))}", "scopes")
        if self.expires_at is not None and self.expires_at.tzinfo is None:
            raise InvalidSettings("expires_at must name its time zone", "expires_at")


CHANGEABLE = ("name", "scopes", "limits", "models", "expires_at", "allowed_ips")


@dataclass(frozen=True)
class IssuedKey:
    """A new key; `key` is shown now and never again."""

    row: ApiKey
    key: str


class KeyBook:
    """What is in the database of all keys of all tenants."""

    def __init__(self, database: Database, epochs: Epochs, pepper: Pepper) -> None:
        self._database = database
        self._epochs = epochs
        self._pepper = pepper

    async def issue(self, tenant_id: str, spec: KeySpec, actor: Actor) -> IssuedKey:
        """Raises TenantNotFound, MayNotGrant."""
        _check_grant(actor, spec.scopes)
        key_id, key = make_key()
        row = self._row(key_id, tenant_id, spec, sha256_of(key))
        row.hint = key[-4:]
        try:
            async with self._database.begin() as session:  # no epoch: nobody can have read this key before
                session.add(row)
                await session.flush()
                audit.append(session, actor, Act("key.create", tenant_id, key_id, after=describe(row)))
        except IntegrityError as error:
            raise TenantNotFound(f"tenant {tenant_id!r} does not exist") from error
        return IssuedKey(row, key)

    async def import_legacy(self, tenant_id: str, spec: KeySpec, sha256: bytes, hint: str, actor: Actor) -> ApiKey:
        """A key of any form that another gateway made, known by its SHA-256.

        Raises TenantNotFound, KeyExists, MayNotGrant.
        """
        _check_grant(actor, spec.scopes)
        row = self._row(make_key()[0], tenant_id, spec, sha256)
        row.hint, row.is_legacy = hint, True
        async with self._database.begin() as session:
            if await session.get(Tenant, tenant_id) is None:
                raise TenantNotFound(f"tenant {tenant_id!r} does not exist")
            if await session.scalar(select(ApiKey.id).where(ApiKey.digest.in_(self._pepper.seals(sha256)))):
                raise KeyExists("a key with this SHA-256 was imported before")
            session.add(row)
            try:
                await session.flush()
            except IntegrityError as error:
                raise KeyExists("a key with this SHA-256 was imported before") from error
            audit.append(session, actor, Act("key.import", tenant_id, row.id, after=describe(row)))
        return row

    async def rotate(self, tenant_id: str, key_id: str, overlap_s: float, actor: Actor) -> IssuedKey:
        """A new key with the same rights; the old one ends after `overlap_s`, if it does not end before.

        Raises KeyNotFound, MayNotGrant.
        """
        new_id, key = make_key()
        version, digest = self._pepper.seal(sha256_of(key))
        async with self._epochs.change(tenant_id) as session:
            old = await _find(session, tenant_id, key_id, lock=True)
            _check_grant(actor, old.scopes)
            if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now()):
                raise KeyNotFound(f"key {key_id!r} has ended")
            row = ApiKey(
                id=new_id, tenant_id=tenant_id, name=old.name, digest=digest, pepper_version=version, hint=key[-4:],
                scopes=old.scopes, models=old.models, limits=old.limits, allowed_ips=old.allowed_ips,
                expires_at=old.expires_at, rotated_from=old.id, is_legacy=False, created_at=now(),
            )  # fmt: skip
            session.add(row)
            before, end = describe(old), now() + timedelta(seconds=overlap_s)
            old.expires_at = end if old.expires_at is None else min(end, old.expires_at)
            await session.flush()
            after = {"old": describe(old), "new": describe(row)}
            audit.append(session, actor, Act("key.rotate", tenant_id, key_id, before, after))
        return IssuedKey(row, key)

    async def patch(self, tenant_id: str, key_id: str, changes: Mapping[str, Any], actor: Actor) -> ApiKey:
        """Change the fields named (CHANGEABLE). `limits`: a Limits replaces all, a mapping only those that it names.

        Acts at the key's next request on every worker. Raises KeyNotFound, InvalidSettings, MayNotGrant.
        """
        for name in changes:
            if name not in CHANGEABLE:
                raise InvalidSettings(f"{name!r} can't be changed", name)
        async with self._epochs.change(tenant_id) as session:
            row = await _find(session, tenant_id, key_id, lock=True)
            if row.revoked_at is not None:
                raise KeyNotFound(f"key {key_id!r} has ended")
            before = describe(row)
            spec = KeySpec(**{**_as_spec(row), **changes, "limits": Limits.of(row.limits).with_changes(changes)})
            _check_grant(actor, spec.scopes)
            for name, value in _stored(spec).items():
                setattr(row, name, value)
            await session.flush()
            audit.append(session, actor, Act("key.update", tenant_id, key_id, before, describe(row)))
        return row

    async def get(self, tenant_id: str, key_id: str) -> ApiKey:
        """Raises KeyNotFound."""
        async with self._database.session() as session:
            return await _find(session, tenant_id, key_id)

    async def page(self, tenant_id: str, after: str | None = None, limit: int = 100) -> tuple[list[ApiKey], bool]:
        """Keys in the order of ids, and whether there are more. Revoked keys are listed, with their date."""
        return await self._database.page(select(ApiKey).where(ApiKey.tenant_id == tenant_id), ApiKey.id, after, limit)

    async def revoke(self, tenant_id: str, key_id: str, actor: Actor) -> ApiKey:
        """From the next request on, on every worker, the key is unknown. Raises KeyNotFound."""
        async with self._epochs.change(tenant_id) as session:
            row = await _find(session, tenant_id, key_id)
            if row.revoked_at is None:
                before = describe(row)
                row.revoked_at = now()
                audit.append(session, actor, Act("key.revoke", tenant_id, key_id, before, describe(row)))
        return row

    def _row(self, key_id: str, tenant_id: str, spec: KeySpec, sha256: bytes) -> ApiKey:
        version, digest = self._pepper.seal(sha256)
        return ApiKey(
            id=key_id, tenant_id=tenant_id, digest=digest, pepper_version=version, is_legacy=False, created_at=now(),
            **_stored(spec),
        )  # fmt: skip


def _check_grant(actor: Actor, scopes: Iterable[str]) -> None:
    if "act_as" in scopes and not actor.is_admin:
        raise MayNotGrant("only an admin key with the role admin can make or change a key with the scope `act_as`")


def _as_spec(row: ApiKey) -> dict[str, Any]:
    return {
        "name": row.name, "scopes": tuple(row.scopes), "models": None if row.models is None else tuple(row.models),
        "expires_at": row.expires_at, "allowed_ips": None if row.allowed_ips is None else tuple(row.allowed_ips),
    }  # fmt: skip


def _stored(spec: KeySpec) -> dict[str, Any]:
    return {
        "name": spec.name, "scopes": sorted(set(spec.scopes)), "models": check_models(spec.models),
        "limits": spec.limits.as_dict(), "allowed_ips": check_addresses(spec.allowed_ips),
        "expires_at": spec.expires_at,
    }  # fmt: skip


async def _find(session: AsyncSession, tenant_id: str, key_id: str, lock: bool = False) -> ApiKey:
    row = await session.get(ApiKey, key_id, with_for_update=lock or None)
    if row is None or row.tenant_id != tenant_id:
        raise KeyNotFound(f"tenant {tenant_id!r} has no key {key_id!r}")
    return row


def describe(row: ApiKey) -> dict[str, Any]:
    """The key as the audit log keeps it: nothing secret."""
    return {
        "id": row.id, "name": row.name, "scopes": row.scopes, "models": row.models,
        "limits": asdict(Limits.of(row.limits)), "hint": row.hint, "allowed_ips": row.allowed_ips,
        "is_legacy": bool(row.is_legacy), "rotated_from": row.rotated_from,
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(),
    }  # fmt: skip
