"""API keys: issue, authenticate → Principal, revoke. Knows no HTTP.

    InvalidKey         malformed, unknown, revoked or expired: one error, so that nothing can be told apart
    TenantSuspended    the key is good, its tenant is not
    KeyNotFound        (administration) the tenant has no such key

A principal is cached by the full SHA-256 of its key and used as long as the tenant's epoch stands still, so that no
request needs SQL and yet every change acts at the next request of every worker.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.directory import TenantNotFound
from tenants.epochs import Epochs
from tenants.key_format import Pepper, make_key, public_id
from tenants.limits import PRIORITIES, InvalidSettings, Limits, ModelLimits, check_models, check_name
from tenants.models import ApiKey, Plan, Tenant
from tenants.plans import effective
from tenants.state import Client

SCOPES = frozenset({"inference", "adapters:write"})
CACHE_SIZE = 10_000


class InvalidKey(Exception):
    """No such key."""


class TenantSuspended(Exception):
    """The tenant of this key is suspended."""


class KeyNotFound(LookupError):
    """The tenant has no such key."""


@dataclass(frozen=True)
class Principal:
    """Who asks: an authenticated key with everything a request needs, immutable, so that it can be cached.

    lane_weight, priority   the tenant's share and class in the engine (0 interactive, 1 standard, 2 batch)
    tenant_limits           those of the tenant itself, over those of its plan
    model_limits            of the tenant for single models, by name without version
    models                  names and globs that the tenant may call; None = all that it can see
    key_models              the same of the key: a model must be allowed by both (limits.may_call)
    cache_salt              opaque, per tenant: HMAC(pepper, tenant)
    epoch                   of the tenant in Redis when this was read; quotas.hold() answers Stale if it moved
    generation              of that Redis (a restarted one may have an older epoch again)
    """

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    tenant_limits: Limits = field(default_factory=Limits)
    key_limits: Limits = field(default_factory=Limits)
    model_limits: ModelLimits = field(default_factory=dict)
    models: tuple[str, ...] | None = None
    key_models: tuple[str, ...] | None = None
    lane_weight: float = 1.0
    priority: int = 1
    cache_salt: str = ""
    epoch: int = 0
    generation: int = 0


@dataclass(frozen=True)
class KeySpec:
    """What a new key is asked to be. Raises InvalidSettings."""

    name: str
    scopes: tuple[str, ...] = ("inference",)
    limits: Limits = field(default_factory=Limits)
    models: tuple[str, ...] | None = None
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_models(self.models)
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

    async def authenticate(self, key: str, *, check_epoch: bool = True) -> Principal:
        """The principal of this key, as it is now on every worker.

        check_epoch=False spares the round trip to Redis: only for a request whose hold() will check the epoch
        (on Stale: authenticate again, with check_epoch=True, and hold again).
        Raises InvalidKey, TenantSuspended, RedisUnavailable, DatabaseUnavailable.
        """
        key_id = public_id(key)
        if key_id is None:
            raise InvalidKey("no such key")
        sha256 = hashlib.sha256(key.encode()).digest()
        verdict = self._cache.get(sha256)
        if verdict is None:
            return (await self._read(key_id, sha256, None)).answer()
        self._cache.move_to_end(sha256)
        if not check_epoch and not verdict.is_suspended and verdict.principal.generation == self._redis.generation:
            return verdict.answer()  # a suspension may have ended, and no hold() would tell
        epoch = await self._epochs.get(verdict.principal.tenant_id)
        if verdict.holds(epoch, self._redis.generation):
            return verdict.answer()
        return (await self._read(key_id, sha256, epoch)).answer()

    async def issue(self, tenant_id: str, spec: KeySpec, actor: Actor) -> IssuedKey:
        """Raises TenantNotFound."""
        key_id, key = make_key()
        version, digest = self._pepper.seal(hashlib.sha256(key.encode()).digest())
        row = ApiKey(
            id=key_id, tenant_id=tenant_id, name=spec.name, digest=digest, pepper_version=version, hint=key[-4:],
            scopes=sorted(set(spec.scopes)), models=check_models(spec.models), limits=spec.limits.as_dict(),
            expires_at=spec.expires_at, created_at=now(),
        )  # fmt: skip
        try:
            async with self._database.begin() as session:  # no epoch: nobody can have read this key before
                session.add(row)
                await session.flush()
                audit.append(session, actor, Act("key.create", tenant_id, key_id, after=describe(row)))
        except IntegrityError as error:
            raise TenantNotFound(f"tenant {tenant_id!r} does not exist") from error
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
        principal = replace(self._principal(row, tenant, plan), epoch=epoch, generation=generation)
        return self._keep(sha256, _Verdict(principal, row.revoked_at is not None, tenant.suspended, row.expires_at))

    def _principal(self, row: ApiKey, tenant: Tenant, plan: Plan | None) -> Principal:
        limits, model_limits = effective(tenant, plan)
        return Principal(
            tenant_id=tenant.id, key_id=row.id, scopes=frozenset(row.scopes),
            tenant_limits=limits, key_limits=Limits.of(row.limits), model_limits=model_limits,
            models=None if tenant.models is None else tuple(tenant.models),
            key_models=None if row.models is None else tuple(row.models),
            lane_weight=tenant.weight, priority=PRIORITIES[tenant.priority], cache_salt=self._pepper.salt(tenant.id),
        )  # fmt: skip

    def _keep(self, sha256: bytes, verdict: _Verdict) -> _Verdict:
        self._cache[sha256] = verdict
        self._cache.move_to_end(sha256)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return verdict


async def _find(session: AsyncSession, tenant_id: str, key_id: str) -> ApiKey:
    row = await session.get(ApiKey, key_id)
    if row is None or row.tenant_id != tenant_id:
        raise KeyNotFound(f"tenant {tenant_id!r} has no key {key_id!r}")
    return row


def describe(row: ApiKey) -> dict[str, Any]:
    """The key as the audit log keeps it: nothing secret."""
    return {
        "id": row.id, "name": row.name, "scopes": row.scopes, "models": row.models,
        "limits": asdict(Limits.of(row.limits)), "hint": row.hint,
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(),
    }  # fmt: skip
