"""API keys: make, hash, authenticate → Principal, revoke. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Limits of a tenant or a key; None = unlimited, 0 = nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


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
