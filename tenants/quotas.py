"""Limits per tenant and per key, exact over all workers: hold() before the work, settle() after it, always.

    QuotaExceeded      a limit refuses; nothing was reserved
    Stale              what the worker knows of the tenant is out of date: authenticate again, then hold again
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tenants.keys import Principal
from tenants.state import Client
from tenants.usage import UsageRecord

Dimension = Literal["requests", "tokens", "concurrency"]


@dataclass(frozen=True)
class Window:
    """One limit as it stands: for the x-ratelimit-{limit,remaining,reset}-* headers. `reset_s` = until it is full."""

    limit: int
    remaining: int
    reset_s: float


class QuotaExceeded(Exception):
    """A limit refuses; nothing was consumed. `retry_after_s` is None if waiting can never help.

    scope       whose limit: "tenant" or "key"
    dimension   "requests" (per minute), "tokens" (per minute) or "concurrency"
    windows     the tightest requests and tokens windows, for the headers
    """

    def __init__(
        self, scope: str, dimension: Dimension, limit: int, used: int, requested: int, retry_after_s: float | None,
        windows: dict[str, Window],
    ) -> None:  # fmt: skip
        super().__init__(f"{scope} limit of {limit} {dimension} reached: used {used}, requested {requested}")
        self.scope = scope
        self.dimension = dimension
        self.limit = limit
        self.used = used
        self.requested = requested
        self.retry_after_s = retry_after_s
        self.windows = windows


class Stale(Exception):
    """The tenant's epoch has moved since the principal was read."""


@dataclass(eq=False)
class Hold:
    """A reservation and a lease, kept alive by Quotas until settle(). Set `completion_tokens` as tokens arrive: if this
    process dies, the lease is settled at the number that the last heartbeat carried.

    windows     "requests" and "tokens" → the tightest Window, absent if unlimited: for the response headers
    """

    record: UsageRecord
    principal: Principal
    tokens: int
    windows: dict[str, Window] = field(default_factory=dict)
    completion_tokens: int = 0


class Quotas:
    """Holds, heartbeats and settlements. `async with quotas:` runs its heartbeats, retries and sweeps."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def hold(self, principal: Principal, record: UsageRecord, tokens: int) -> Hold:
        """Reserve one request, `tokens` tokens and one lease under every limit of tenant and key, or nothing.

        record: the attempt with its prompt counted. Repeating it with the same attempt_id is harmless.
        Raises QuotaExceeded, Stale, RedisUnavailable.
        """
        raise NotImplementedError

    async def settle(self, hold: Hold, record: UsageRecord) -> None:
        """Release the lease, correct the tokens to record.total_tokens and append the usage entry. Never raises for
        an outage: it is kept and retried. Safe under cancellation; repeating it is harmless."""
        raise NotImplementedError
