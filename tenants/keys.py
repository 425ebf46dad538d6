"""API keys: issue, import, rotate, authenticate → Principal, revoke. Knows no HTTP.

    InvalidKey         malformed, unknown, revoked or expired: one error, so that nothing can be told apart
    TenantSuspended    the key is good, its tenant is not
    MayNotAct          the key has no right to act for another tenant
    KeyNotFound        (administration) the tenant has no such key
    KeyExists          (administration) this key was imported before

A principal is cached by the full SHA-256 of its key and used as long as the tenant's epoch stands still, so that no
request needs SQL and yet every change acts at the next request of every worker.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
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
from tenants.key_format import Pepper, make_key, public_id, sha256_of
from tenants.limits import NAME, InvalidSettings, Limits, check_models, check_name
from tenants.models import ApiKey, Plan, Tenant
from tenants.principal import Principal, of_tenant, with_key, with_key_of
from tenants.state import Client

SCOPES = frozenset({"inference", "adapters:write", "act_as"})
CACHE_SIZE = 10_000
MIN_LEGACY = 8
"""Shorter texts are no keys, whoever made them."""
__all__ = ["IssuedKey", "KeyRing", "KeySpec", "Principal"]


class InvalidKey(Exception):
    """No such key."""


class TenantSuspended(Exception):
    """The tenant of this key is suspended."""


class MayNotAct(Exception):
    """The key has no right to act for another tenant."""


class KeyNotFound(LookupError):
    """The tenant has no such key, or it has ended."""


class KeyExists(Exception):
    """This key was imported before."""


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


@dataclass(frozen=True)
class IssuedKey:
    """A new key; `key` is shown now and never again."""

    row: ApiKey
    key: str


@dataclass(frozen=True)
class _Verdict:
    """What SQL said about one key."""

    principal: Principal
    is_revoked: bool
    is_suspended: bool
    expires_at: datetime | None

    def answer(self) -> Principal:
        if self.is_revoked or (self.expires_at is not None and self.expires_at <= now()):
            raise InvalidKey("no such key")
        if self.is_suspended:
            raise TenantSuspended(f"tenant {self.principal.tenant_id!r} is suspended")
        return self.principal

    def holds(self, epoch: int, generation: int) -> bool:
        """Is it still true, now that the tenant's epoch is this, in this Redis?"""
        return (self.principal.epoch, self.principal.generation) == (epoch, generation)


class KeyRing:
    """All keys of all tenants."""

    def __init__(self, database: Database, redis: Client, pepper: str) -> None:
        """pepper: see Pepper.parse."""
        self._database = database
        self._redis = redis
        self._epochs = Epochs(database, redis)
        self._pepper = Pepper.parse(pepper)
        self._cache: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._tenants: OrderedDict[str, tuple[Principal, bool]] = OrderedDict()

    async def authenticate(self, key: str, *, check_epoch: bool = True, act_as: str | None = None) -> Principal:
        """The principal of this key, as it is now on every worker; for another tenant, if it may `act_as` it.

        check_epoch=False spares the round trip to Redis: only for a request whose hold() will check the epoch
        (on Stale: authenticate again, with check_epoch=True, and hold again).
        Raises InvalidKey, TenantSuspended, MayNotAct, TenantNotFound, RedisUnavailable, DatabaseUnavailable.
        """
        if act_as is None:
            return await self._authenticate(key, check_epoch)
        home = await self._authenticate(key, True)
        return home if act_as == home.tenant_id else await self._acting(home, act_as)

    async def _authenticate(self, key: str, check_epoch: bool) -> Principal:
        key_id = public_id(key)
        if key_id is None and (key.startswith("chorus_") or len(key) < MIN_LEGACY):
            raise InvalidKey("no such key")
        sha256 = sha256_of(key)
        verdict = self._cache.get(sha256)
        if verdict is None:
            key_id = key_id or await self._legacy_id(sha256)
            return (await self._read(key_id, sha256, None)).answer()
        self._cache.move_to_end(sha256)
        if not check_epoch and not verdict.is_suspended and verdict.principal.generation == self._redis.generation:
            return verdict.answer()  # a suspension may have ended, and no hold() would tell
        epoch = await self._epochs.get(verdict.principal.tenant_id)
        if verdict.holds(epoch, self._redis.generation):
            return verdict.answer()
        return (await self._read(verdict.principal.key_id, sha256, epoch)).answer()

    async def issue(self, tenant_id: str, spec: KeySpec, actor: Actor) -> IssuedKey:
        """Raises TenantNotFound."""
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
        """A key of any form that another gateway made, known by its SHA-256. Raises TenantNotFound, KeyExists."""
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

        Raises KeyNotFound.
        """
        new_id, key = make_key()
        version, digest = self._pepper.seal(sha256_of(key))
        async with self._epochs.change(tenant_id) as session:
            old = await _find(session, tenant_id, key_id, lock=True)
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

    async def get(self, tenant_id: str, key_id: str) -> ApiKey:
        """Raises KeyNotFound."""
        async with self._database.session() as session:
            return await _find(session, tenant_id, key_id)

    async def page(self, tenant_id: str, after: str | None = None, limit: int = 100) -> tuple[list[ApiKey], bool]:
        """Keys in the order of ids, and whether there are more. Revoked keys are listed, with their date."""
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.id).limit(limit + 1)
        if after is not None:
            query = query.where(ApiKey.id > after)
        async with self._database.session() as session:
            rows = list(await session.scalars(query))
        return rows[:limit], len(rows) > limit

    async def revoke(self, tenant_id: str, key_id: str, actor: Actor) -> ApiKey:
        """From the next request on, on every worker, the key is unknown. Raises KeyNotFound."""
        async with self._epochs.change(tenant_id) as session:
            row = await _find(session, tenant_id, key_id)
            if row.revoked_at is None:
                before = describe(row)
                row.revoked_at = now()
                audit.append(session, actor, Act("key.revoke", tenant_id, key_id, before, describe(row)))
        return row

    async def _read(self, key_id: str, sha256: bytes, epoch: int | None) -> _Verdict:
        """Ask SQL. The epoch is read first: data can only be newer than it says, never older."""
        if epoch is None:
            async with self._database.session() as session:
                tenant_id = await session.scalar(select(ApiKey.tenant_id).where(ApiKey.id == key_id))
            if tenant_id is None:
                raise InvalidKey("no such key")
            epoch = await self._epochs.get(tenant_id)
        generation = self._redis.generation
        async with self._database.session() as session:
            query = (
                select(ApiKey, Tenant, Plan).select_from(ApiKey).join(Tenant).outerjoin(Plan, Plan.id == Tenant.plan)
            )
            found = (await session.execute(query.where(ApiKey.id == key_id))).first()
        if found is None or not self._pepper.opens(found[0].digest, found[0].pepper_version, sha256):
            self._cache.pop(sha256, None)
            raise InvalidKey("no such key")
        row, tenant, plan = found
        principal = with_key(of_tenant(tenant, plan, self._pepper.salt(tenant.id)), row)
        principal = replace(principal, epoch=epoch, generation=generation)
        return self._keep(sha256, _Verdict(principal, row.revoked_at is not None, tenant.suspended, row.expires_at))

    async def _legacy_id(self, sha256: bytes) -> str:
        """Raises InvalidKey."""
        query = select(ApiKey.id).where(ApiKey.digest.in_(self._pepper.seals(sha256)), ApiKey.is_legacy)
        async with self._database.session() as session:
            key_id = await session.scalar(query)
        if key_id is None:
            raise InvalidKey("no such key")
        return str(key_id)

    async def _acting(self, home: Principal, tenant_id: str) -> Principal:
        """The tenant as it is now, with the rights of a key of another one."""
        if "act_as" not in home.scopes:
            raise MayNotAct("this key may not act for other tenants")
        if not NAME.fullmatch(tenant_id):
            raise TenantNotFound(f"tenant {tenant_id[:64]!r} does not exist")
        epoch, generation = await self._epochs.get(tenant_id), self._redis.generation
        found, is_suspended = self._tenants.get(tenant_id, (None, False))
        if found is None or (found.epoch, found.generation) != (epoch, generation):
            async with self._database.session() as session:
                tenant = await session.get(Tenant, tenant_id)
                plan = None if tenant is None or tenant.plan is None else await session.get(Plan, tenant.plan)
            if tenant is None:
                self._tenants.pop(tenant_id, None)
                raise TenantNotFound(f"tenant {tenant_id!r} does not exist")
            found = replace(of_tenant(tenant, plan, self._pepper.salt(tenant.id)), epoch=epoch, generation=generation)
            self._tenants[tenant_id] = found, (is_suspended := tenant.suspended)
            while len(self._tenants) > CACHE_SIZE:
                self._tenants.popitem(last=False)
        if is_suspended:
            raise TenantSuspended(f"tenant {tenant_id!r} is suspended")
        return with_key_of(found, home)

    def _row(self, key_id: str, tenant_id: str, spec: KeySpec, sha256: bytes) -> ApiKey:
        version, digest = self._pepper.seal(sha256)
        return ApiKey(
            id=key_id, tenant_id=tenant_id, name=spec.name, digest=digest, pepper_version=version, is_legacy=False,
            scopes=sorted(set(spec.scopes)), models=check_models(spec.models), limits=spec.limits.as_dict(),
            allowed_ips=check_addresses(spec.allowed_ips), expires_at=spec.expires_at, created_at=now(),
        )  # fmt: skip

    def _keep(self, sha256: bytes, verdict: _Verdict) -> _Verdict:
        self._cache[sha256] = verdict
        self._cache.move_to_end(sha256)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return verdict


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
