"""KeyRing: authenticate a key → Principal; and, with its base, the administration of keys. Knows no HTTP.

    InvalidKey         malformed, unknown, revoked or expired: one error, so that nothing can be told apart
    TenantSuspended    the key is good, its tenant is not
    MayNotAct          the key has no right to act for another tenant

A principal is cached by the full SHA-256 of its key and used as long as the tenant's epoch stands still, so that no
request needs SQL and yet every change acts at the next request of every worker.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import select

from tenants.budgets import Budgets
from tenants.db import Database, now
from tenants.directory import TenantNotFound
from tenants.epochs import Epochs
from tenants.key_book import IssuedKey, KeyBook, KeyExists, KeyNotFound, KeySpec, MayNotGrant
from tenants.key_format import Pepper, public_id, sha256_of
from tenants.limits import NAME
from tenants.models import ApiKey, Plan, Tenant
from tenants.owners import cache_salt
from tenants.principal import Principal, of_tenant, with_key, with_key_of
from tenants.state import Client

CACHE_SIZE = 10_000
MIN_LEGACY = 8
"""Shorter texts are no keys, whoever made them."""
__all__ = ["IssuedKey", "KeyExists", "KeyNotFound", "KeyRing", "KeySpec", "MayNotGrant", "Principal"]


class InvalidKey(Exception):
    """No such key."""


class TenantSuspended(Exception):
    """The tenant of this key is suspended."""


class MayNotAct(Exception):
    """The key has no right to act for another tenant."""


@dataclass(frozen=True)
class _Verdict:
    """What SQL said about one key."""

    principal: Principal
    is_revoked: bool
    is_suspended: bool
    expires_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.is_revoked or (self.expires_at is not None and self.expires_at <= now())

    @property
    def is_good(self) -> bool:
        return not self.is_suspended and not self.has_ended

    def answer(self) -> Principal:
        if self.has_ended:
            raise InvalidKey("no such key")
        if self.is_suspended:
            raise TenantSuspended(f"tenant {self.principal.tenant_id!r} is suspended")
        return self.principal

    def holds(self, epoch: int, generation: int) -> bool:
        """Is it still true, now that the tenant's epoch is this, in this Redis?"""
        return (self.principal.epoch, self.principal.generation) == (epoch, generation)


class KeyRing(KeyBook):
    """All keys of all tenants."""

    def __init__(self, database: Database, redis: Client, pepper: str) -> None:
        """pepper: see Pepper.parse."""
        super().__init__(database, Epochs(database, redis), Pepper.parse(pepper))
        self._redis = redis
        self._budgets = Budgets(database, redis)
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
        sha256 = sha256_of(key)
        verdict = self._cache.get(sha256)
        if verdict is None:
            key_id = public_id(key)
            if key_id is None and (key.startswith("chorus_") or len(key) < MIN_LEGACY):
                raise InvalidKey("no such key")
            key_id = key_id or await self._legacy_id(sha256)
            return (await self._read(key_id, sha256, None)).answer()
        self._cache.move_to_end(sha256)
        if not check_epoch and verdict.is_good and verdict.principal.generation == self._redis.generation:
            return verdict.principal  # if it is not good, that may have changed, and no hold() would tell
        epoch = await self._epochs.get(verdict.principal.tenant_id)
        if verdict.holds(epoch, self._redis.generation):
            return verdict.answer()
        return (await self._read(verdict.principal.key_id, sha256, epoch)).answer()

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
        principal = with_key(of_tenant(tenant, plan, cache_salt(self._pepper, tenant)), row)
        principal = replace(principal, epoch=epoch, generation=generation)
        await self._budgets.ensure(principal)
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
            found = replace(
                of_tenant(tenant, plan, cache_salt(self._pepper, tenant)), epoch=epoch, generation=generation
            )
            self._tenants[tenant_id] = found, (is_suspended := tenant.suspended)
            while len(self._tenants) > CACHE_SIZE:
                self._tenants.popitem(last=False)
        if is_suspended:
            raise TenantSuspended(f"tenant {tenant_id!r} is suspended")
        principal = with_key_of(found, home)
        await self._budgets.ensure(principal)
        return principal

    def _keep(self, sha256: bytes, verdict: _Verdict) -> _Verdict:
        self._cache[sha256] = verdict
        self._cache.move_to_end(sha256)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return verdict
