"""API keys: make, hash, authenticate → Principal, revoke. Knows no HTTP.

    InvalidKey         malformed, unknown, revoked or expired: one error, so that nothing can be told apart
    TenantSuspended    the key is good, its tenant is not
    KeyNotFound        (administration) no such key in this tenant
    InvalidSettings    (tenants.limits) a value that can't be
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from tenants.audit import Actor
from tenants.db import Database
from tenants.epochs import Epochs
from tenants.limits import Limits
from tenants.models import ApiKey
from tenants.state import Client

SCOPES = frozenset({"inference", "adapters:write"})


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
    models                  names and globs that tenant and key may call; None = all that the tenant can see
    cache_salt              opaque, per tenant: HMAC(pepper, tenant)
    epoch                   of the tenant in Redis when this was read; quotas.hold() answers STALE if it moved
    """

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    tenant_limits: Limits = field(default_factory=Limits)
    key_limits: Limits = field(default_factory=Limits)
    models: tuple[str, ...] | None = None
    key_models: tuple[str, ...] | None = None
    lane_weight: float = 1.0
    priority: int = 1
    cache_salt: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class KeySpec:
    """What a new key is asked to be."""

    name: str
    scopes: tuple[str, ...] = ("inference",)
    limits: Limits = field(default_factory=Limits)
    models: tuple[str, ...] | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True)
class IssuedKey:
    """A new key; `key` is shown now and never again."""

    row: ApiKey
    key: str


class KeyRing:
    """All keys of all tenants."""

    def __init__(self, database: Database, redis: Client, pepper: str) -> None:
        self._database = database
        self._redis = redis
        self._epochs = Epochs(database, redis)

    async def authenticate(self, key: str, *, check_epoch: bool = True) -> Principal:
        """The principal of this key, as it is now on every worker.

        check_epoch=False spares the round trip to Redis: only for a request whose hold() will check the epoch
        (on Stale: authenticate again, with check_epoch=True, and hold again).
        Raises InvalidKey, TenantSuspended, RedisUnavailable, DatabaseUnavailable.
        """
        raise NotImplementedError

    async def issue(self, tenant_id: str, spec: KeySpec, actor: Actor) -> IssuedKey:
        """Raises TenantNotFound, InvalidSettings."""
        raise NotImplementedError

    async def get(self, tenant_id: str, key_id: str) -> ApiKey:
        """Raises KeyNotFound."""
        raise NotImplementedError

    async def page(self, tenant_id: str, after: str | None = None, limit: int = 100) -> tuple[list[ApiKey], bool]:
        """A page in the order of ids, and whether there are more. Revoked keys are listed, with their date."""
        raise NotImplementedError

    async def revoke(self, tenant_id: str, key_id: str, actor: Actor) -> ApiKey:
        """From the next request on, on every worker, the key is unknown. Raises KeyNotFound."""
        raise NotImplementedError
