"""Principal: who asks, with everything that a request needs to know of them. Data only; and how rows become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tenants.addresses import Network, networks
from tenants.limits import PRIORITIES, Limits, ModelLimits
from tenants.models import ApiKey, Plan, Tenant
from tenants.plans import effective
from tenants.retention import seconds_of


@dataclass(frozen=True)
class Principal:
    """Who asks: an authenticated key with everything a request needs, immutable, so that it can be cached.

    lane_weight, priority   the tenant's share and class in the engine (0 interactive, 1 standard, 2 batch)
    tenant_limits           those of the tenant itself, over those of its plan
    model_limits            of the tenant for single models, by name without version
    models                  names and globs that the tenant may call; None = all that it can see
    key_models              the same of the key: a model must be allowed by both (limits.may_call)
    model_names             the tenant's own names for models → what they stand for
    allowed_ips             where the key may be used from (addresses.is_within); None = anywhere
    cache_salt              opaque, per tenant and retention (owners.cache_salt)
    ignores_unknown         fields of a request that nobody knows are left out and named, not refused
    retention_s             how long its texts may be kept; None = as the settings say, 0 = not at all
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
    model_names: Mapping[str, str] = field(default_factory=dict)
    allowed_ips: tuple[Network, ...] | None = None
    lane_weight: float = 1.0
    priority: int = 1
    cache_salt: str = ""
    ignores_unknown: bool = False
    retention_s: int | None = None
    epoch: int = 0
    generation: int = 0
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """For tenants.quotas: what it has worked out, by model."""


def of_tenant(tenant: Tenant, plan: Plan | None, cache_salt: str) -> Principal:
    """What the tenant contributes: nobody's key yet."""
    limits, model_limits = effective(tenant, plan)
    return Principal(
        tenant_id=tenant.id, key_id="", scopes=frozenset(), tenant_limits=limits, model_limits=model_limits,
        models=None if tenant.models is None else tuple(tenant.models), model_names=tenant.model_names,
        lane_weight=tenant.weight, priority=PRIORITIES[tenant.priority], cache_salt=cache_salt,
        ignores_unknown=tenant.unknown_fields == "warn", retention_s=seconds_of(tenant.retention_hours),
    )  # fmt: skip


def with_key(principal: Principal, row: ApiKey) -> Principal:
    """And what the key contributes."""
    return replace(
        principal, key_id=row.id, scopes=frozenset(row.scopes), key_limits=Limits.of(row.limits),
        key_models=None if row.models is None else tuple(row.models), allowed_ips=networks(row.allowed_ips),
    )  # fmt: skip


def with_key_of(principal: Principal, other: Principal) -> Principal:
    """The tenant of one, the key of another, which may not act for a third."""
    return replace(
        principal, key_id=other.key_id, scopes=other.scopes - {"act_as"}, key_limits=other.key_limits,
        key_models=other.key_models, allowed_ips=other.allowed_ips,
    )  # fmt: skip
