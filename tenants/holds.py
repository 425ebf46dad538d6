"""Hold: a reservation under every limit and a lease, between tenants.quotas' hold() and settle(). Knows no Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from tenants.courses import Bucket
from tenants.gates import Gate, Window
from tenants.slots import TenantSlot
from tenants.usage import UsageRecord


class Blob(msgspec.Struct, array_like=True):
    """What sweep() needs to settle an attempt whose worker is dead."""

    record: UsageRecord
    model: str
    buckets: list[Bucket]


@dataclass(eq=False)
class Hold:
    """A reservation and a lease, until settle(). Set `completion_tokens` as tokens arrive: if this process dies, the
    attempt is billed by the number that the last heartbeat carried.

    model       whose limits it is counted under
    tokens      reserved: prompt + what may come; top_up() adds to it
    ceiling     what it can come to at most
    windows     "requests" and "tokens" → the tightest Window, absent if unlimited: for the response headers
    exceeded    limits that let it through although it is above them: soft budgets, limits in shadow mode
    """

    record: UsageRecord
    model: str
    tokens: int
    ceiling: int
    buckets: list[Bucket]
    generation: int
    windows: dict[str, Window] = field(default_factory=dict)
    exceeded: list[Gate] = field(default_factory=list)
    completion_tokens: int = 0

    @property
    def used_tokens(self) -> int:
        """So far."""
        return self.record.prompt_tokens + self.completion_tokens

    @cached_property
    def slot(self) -> TenantSlot:
        return TenantSlot(self.record.tenant_id)

    @cached_property
    def lease_keys(self) -> list[str]:
        """Record of the attempt, leases of tenant, key and model: what every script call on it begins with."""
        slot, record = self.slot, self.record
        leases = [slot.leases, slot.key_leases(record.key_id), slot.model_leases(self.model)]
        return [slot.attempt(record.attempt_id), *leases]

    @property
    def has_budgets(self) -> bool:
        return any(bucket.period != "minute" for bucket in self.buckets)

    @property
    def blob(self) -> bytes:
        return msgspec.json.encode(Blob(self.record, self.model, self.buckets))
