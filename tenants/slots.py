"""Names of Redis keys. All keys of one tenant lie in one hash slot, so that one script can work on them together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

ACTIVE = "chorus:active"
"""Sorted set of tenants that may have leases or unwritten usage: tenant → when last seen (s)."""
LIFE = "chorus:life"
"""Another value after Redis has lost everything."""
UPKEEP = "chorus:upkeep"
"""Held by the worker that sweeps and flushes at present. It saves work; nothing depends on it."""


@dataclass(frozen=True)
class TenantSlot:
    """The keys of one tenant."""

    tenant_id: str

    @cached_property
    def _slot(self) -> str:
        return f"{{t:{self.tenant_id}}}"

    @property
    def epoch(self) -> str:
        return f"{self._slot}:epoch"

    @property
    def leases(self) -> str:
        return f"{self._slot}:leases"

    @property
    def usage(self) -> str:
        """Stream of usage entries that are not yet in the ledger."""
        return f"{self._slot}:usage"

    @property
    def reader(self) -> str:
        """Another value whenever somebody has begun to read the stream for the ledger."""
        return f"{self._slot}:usage:reader"

    @property
    def counting(self) -> str:
        """There while somebody who has failed too often counts the budgets: the stream is not to be read."""
        return f"{self._slot}:usage:counting"

    @property
    def damaged_usage(self) -> str:
        """List of stream entries that nobody could read: kept for a person to look at."""
        return f"{self._slot}:usage:damaged"

    def key_leases(self, key_id: str) -> str:
        return f"{self._slot}:leases:{key_id}"

    def model_leases(self, model: str) -> str:
        return f"{self._slot}:leases:model:{model}"

    def bucket(self, owner: str, dimension: str) -> str:
        """`owner` is "tenant", the id of a key, or "model:<name>"."""
        return f"{self._slot}:bucket:{owner}:{dimension}"

    def attempt(self, attempt_id: str) -> str:
        return f"{self._slot}:attempt:{attempt_id}"
