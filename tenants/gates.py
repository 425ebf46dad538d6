"""The limits that one request must pass, what they say to a refused one, and the windows of its headers. No I/O.

QuotaExceeded      a limit refuses; nothing was consumed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tenants.limits import Limits

Dimension = Literal["requests", "tokens", "concurrency"]
Scope = Literal["tenant", "key"]
MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""When to come back if all leases are taken: nobody knows when one ends."""


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
    windows     "requests" and "tokens" → the tightest Window, absent if unlimited: for the headers
    """

    def __init__(self, gate: Gate, used: float, windows: dict[str, Window]) -> None:
        self.scope = gate.scope
        self.dimension = gate.dimension
        self.limit = gate.limit or 0
        self.used = math.ceil(used)
        self.requested = gate.cost
        self.retry_after_s = gate.retry_after_s(used)
        self.windows = windows
        super().__init__(
            f"{self.scope} limit reached: {self.dimension}{' per minute' if gate.is_rate else ''}: "
            f"Limit {self.limit}, Used {self.used}, Requested {self.requested}"
        )


@dataclass(frozen=True)
class Gate:
    """One limit (None = any number) and what one request takes of it."""

    scope: Scope
    dimension: Dimension
    limit: int | None
    cost: int = 1

    @property
    def is_rate(self) -> bool:
        return self.dimension != "concurrency"

    def refuses(self, used: float) -> bool:
        return self.limit is not None and used + self.cost > self.limit

    def retry_after_s(self, used: float) -> float | None:
        """Seconds until this would pass, if nothing else came; None = never."""
        if self.limit is None or self.cost > self.limit:
            return None
        return (used + self.cost - self.limit) / self.limit * MINUTE_S if self.is_rate else BUSY_RETRY_S

    def window(self, used: float) -> Window:
        limit = self.limit or 0
        reset_s = used / limit * MINUTE_S if limit else 0.0
        return Window(limit, max(0, math.floor(limit - used + 1e-6)), reset_s)


def gates(tenant: Limits, key: Limits, tokens: int) -> list[Gate]:
    """Every limit of this request: first the leases of tenant and key, limited or not, then the limited rates."""
    found = [Gate("tenant", "concurrency", tenant.concurrency), Gate("key", "concurrency", key.concurrency)]
    owners: tuple[tuple[Scope, Limits], ...] = (("tenant", tenant), ("key", key))
    for scope, limits in owners:
        if limits.requests_per_minute is not None:
            found.append(Gate(scope, "requests", limits.requests_per_minute))
        if limits.tokens_per_minute is not None:
            found.append(Gate(scope, "tokens", limits.tokens_per_minute, tokens))
    return found


def windows(passed: Sequence[Gate], used: Sequence[float]) -> dict[str, Window]:
    """The tightest window of requests and of tokens."""
    found: dict[str, Window] = {}
    for gate, level in zip(passed, used, strict=True):
        if gate.is_rate:
            window = gate.window(level)
            if gate.dimension not in found or window.remaining < found[gate.dimension].remaining:
                found[gate.dimension] = window
    return found


def refusal(refused: Sequence[Gate], used: Sequence[float]) -> QuotaExceeded:
    """What to tell: the limit that takes longest to pass (never being longest), with the windows as they stand."""

    def wait_s(pair: tuple[Gate, float]) -> float:
        wait = pair[0].retry_after_s(pair[1])
        return math.inf if wait is None else wait

    closed = [(gate, level) for gate, level in zip(refused, used, strict=True) if gate.refuses(level)]
    gate, level = max(closed, key=wait_s)
    return QuotaExceeded(gate, level, windows(refused, used))
