"""Hold: a reservation under every limit and a lease, between tenants.quotas' hold() and settle(). Knows no Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from tenants.courses import Bucket
from tenants.gates import Gate, Window, windows
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
    passed      every limit that it passed, and how much of it others had taken
    exceeded    limits that let it through although it is above them: soft budgets, limits in shadow mode
    """

    record: UsageRecord
    model: str
    tokens: int
    ceiling: int
    buckets: list[Bucket]
    generation: int
    passed: Sequence[tuple[Gate, float]] = ()
    exceeded: list[Gate] = field(default_factory=list)
    completion_tokens: int = 0

    @property
    def windows(self) -> dict[str, Window]:
        """The tightest of "requests" and "tokens", absent if unlimited: for the response headers."""
        return windows([(gate, level + gate.cost) for gate, level in self.passed])

    @property
    def windows_unused(self) -> dict[str, Window]:
        """The same when its tokens have been given back."""
        return windows([(gate, level + (gate.dimension != "tokens")) for gate, level in self.passed])

    @property
    def is_roomy(self) -> bool:
        """At most half of every limit was taken, with this one."""
        return not any(gate.is_half_taken(level) for gate, level in self.passed)

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
