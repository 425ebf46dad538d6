"""The limits that one request must pass, what they say to a refused one, and the windows of its headers. No I/O.

QuotaExceeded      a limit refuses; nothing was consumed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from tenants.limits import Limits, Mode

Dimension = Literal["requests", "tokens", "concurrency"]
Period = Literal["minute", "day", "month", ""]
Scope = Literal["tenant", "key", "model"]
MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""When to come back if all leases are taken: nobody knows when one ends."""
_KINDS: dict[str, tuple[Dimension, Period]] = {
    "requests_per_minute": ("requests", "minute"), "tokens_per_minute": ("tokens", "minute"),
    "tokens_per_day": ("tokens", "day"), "tokens_per_month": ("tokens", "month"), "concurrency": ("concurrency", ""),
}  # fmt: skip


class Window(NamedTuple):
    """One limit as it stands: for the x-ratelimit-{limit,remaining,reset}-* headers. `reset_s` = until it is full."""

    limit: int
    remaining: int
    reset_s: float


class QuotaExceeded(Exception):
    """A limit refuses; nothing was consumed. `retry_after_s` is None if waiting can't help, or not soon.

    scope        whose limit: "tenant", "key" or (of the tenant for one) "model"
    dimension    "requests", "tokens" or "concurrency"
    period       "minute"; "day" or "month" for a budget; "" for concurrency
    reset_s      until the budget begins anew; None for other limits
    windows      "requests" and "tokens" → the tightest Window, absent if unlimited: for the headers
    """

    def __init__(self, gate: Gate, used: float, windows: dict[str, Window], now_s: float) -> None:
        self.scope = gate.scope
        self.dimension = gate.dimension
        self.period = gate.period
        self.limit = gate.limit or 0
        self.used = math.ceil(used)
        self.requested = gate.cost
        self.retry_after_s = gate.retry_after_s(used)
        self.reset_s = until_next(gate.period, now_s) if gate.is_budget else None
        self.windows = windows
        super().__init__(
            f"{self.scope} limit reached: {gate}: Limit {self.limit}, Used {self.used}, Requested {self.requested}"
        )


class Gate(NamedTuple):
    """One limit (None = any number) and what one request takes of it. `name` is that of the field of Limits."""

    scope: Scope
    name: str
    limit: int | None
    cost: int = 1
    mode: Mode = "hard"

    def __str__(self) -> str:
        return f"{self.dimension} per {self.period}" if self.period else self.dimension

    @property
    def dimension(self) -> Dimension:
        return _KINDS[self.name][0]

    @property
    def period(self) -> Period:
        return _KINDS[self.name][1]

    @property
    def is_rate(self) -> bool:
        return self.period == "minute"

    @property
    def is_budget(self) -> bool:
        return self.period in ("day", "month")

    def refuses(self, used: float) -> bool:
        return self.mode == "hard" and self.limit is not None and used + self.cost > self.limit

    def exceeds(self, used: float) -> bool:
        """Would it refuse, if it did not let everything through?"""
        return self.mode != "hard" and self.limit is not None and used + self.cost > self.limit

    def is_half_taken(self, used: float) -> bool:
        """Would more than half of it be taken with this request?"""
        return self.mode == "hard" and self.limit is not None and 2 * (used + self.cost) > self.limit

    def retry_after_s(self, used: float) -> float | None:
        """Seconds until this would pass, if nothing else came; None = never, or only in the budget's next window."""
        if self.limit is None or self.cost > self.limit or self.is_budget:
            return None
        return (used + self.cost - self.limit) / self.limit * MINUTE_S if self.is_rate else BUSY_RETRY_S

    def window(self, used: float) -> Window:
        limit = self.limit or 0
        reset_s = used / limit * MINUTE_S if limit else 0.0
        return Window(limit, max(0, math.floor(limit - used + 1e-6)), reset_s)


def gates(tenant: Limits, key: Limits, model: Limits, tokens: int) -> list[Gate]:
    """Every limit of this request: first the leases of tenant, key and model, limited or not, then what is limited."""
    owners: tuple[tuple[Scope, Limits], ...] = (("tenant", tenant), ("key", key), ("model", model))
    found = [
        Gate(scope, "concurrency", limits.concurrency, mode=limits.mode("concurrency")) for scope, limits in owners
    ]
    for scope, limits in owners:
        for name, limit in limits.numbers().items():
            if name != "concurrency":
                cost = 1 if name == "requests_per_minute" else tokens
                found.append(Gate(scope, name, limit, cost, limits.mode(name)))
    return found


def windows(levels: Iterable[tuple[Gate, float]]) -> dict[str, Window]:
    """The tightest window of requests and of tokens per minute, of those that are enforced."""
    found: dict[str, Window] = {}
    for gate, level in levels:
        dimension, period = _KINDS[gate.name]
        if period == "minute" and gate.mode == "hard":
            window = gate.window(level)
            if dimension not in found or window.remaining < found[dimension].remaining:
                found[dimension] = window
    return found


def refusal(levels: Sequence[tuple[Gate, float]], now_s: float) -> QuotaExceeded:
    """What to tell: the limit that takes longest to pass (never being longest), with the windows as they stand."""

    def wait_s(pair: tuple[Gate, float]) -> float:
        wait = pair[0].retry_after_s(pair[1])
        return math.inf if wait is None else wait

    gate, level = max([(gate, level) for gate, level in levels if gate.refuses(level)], key=wait_s)
    return QuotaExceeded(gate, level, windows(levels), now_s)


def until_next(period: Period, now_s: float) -> float:
    """Seconds until the next day or month begins, in UTC."""
    now = datetime.fromtimestamp(now_s, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    begin = day + timedelta(days=1) if period == "day" else (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (begin - now).total_seconds()
