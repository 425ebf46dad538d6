"""Budgets: the counters of tokens per day and month in Redis are what the ledger says, plus what is on its way there,
plus what running attempts have reserved. Redis only keeps them at hand: whenever a tenant's epoch has moved, because a
budget is new, an entry was corrected or Redis has lost something, they are counted again before the next request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson

from tenants.db import Database
from tenants.limits import BUDGETS, Limits
from tenants.principal import Principal
from tenants.slots import TenantSlot
from tenants.state import Argument, Client, RedisUnavailable, Script
from tenants.usage import UsageLedger, UsageRecord

TRIES = 20
PATIENCE = 2
"""Tries beside flushers; where these are quicker than the ledger can be summed, they are asked to wait."""
FLUSHERS_WAIT_MS = 2_000
CACHE_SIZE = 10_000


@dataclass(frozen=True)
class Budget:
    """One counter. `owner` is "tenant", the id of a key, or "model:<name>"; `period` "day" or "month"."""

    owner: str
    period: str

    def key(self, slot: TenantSlot) -> str:
        return slot.bucket(self.owner, f"tokens:{self.period}")


def budgets_of(principal: Principal) -> list[Budget]:
    """Those that are counted as they are: in shadow mode a counter begins when it is tried out."""
    owners = {"tenant": principal.tenant_limits, principal.key_id: principal.key_limits}
    owners |= {f"model:{name}": limits for name, limits in principal.model_limits.items()}
    return [Budget(owner, period) for owner, limits in owners.items() for period in _periods(limits)]


def _periods(limits: Limits) -> list[str]:
    set_here = limits.numbers()
    return [name.rpartition("_")[2] for name in BUDGETS if name in set_here and limits.mode(name) != "shadow"]


class Budgets:
    """The counters of all tenants."""

    def __init__(self, database: Database, redis: Client) -> None:
        self._ledger = UsageLedger(database)
        self._redis = redis
        self._script = Script(Path(__file__).with_name("quotas.lua").read_text())
        self._ensured: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    async def ensure(self, principal: Principal) -> None:
        """Before a principal that was read anew asks for anything: its budgets are counted, as of its epoch.

        Raises RedisUnavailable, DatabaseUnavailable.
        """
        wanted = budgets_of(principal)
        who, when = (principal.tenant_id, principal.key_id), (principal.epoch, principal.generation)
        if not wanted or self._ensured.get(who) == when:
            return
        slot = TenantSlot(principal.tenant_id)
        pipe = self._redis.pipeline(transaction=False)
        for budget in wanted:
            pipe.hget(budget.key(slot), "counted")
        counted = await pipe.execute()
        missing = [budget for budget, epoch in zip(wanted, counted, strict=True) if epoch != str(principal.epoch)]
        await self._recount(principal, missing)
        self._ensured[who] = when
        self._ensured.move_to_end(who)
        while len(self._ensured) > CACHE_SIZE:
            self._ensured.popitem(last=False)

    async def _recount(self, principal: Principal, budgets: Sequence[Budget]) -> None:
        if not budgets:
            return
        slot, names = TenantSlot(principal.tenant_id), principal.model_names
        for tries in range(TRIES):
            if tries >= PATIENCE:
                await self._redis.set(slot.counting, "1", px=FLUSHERS_WAIT_MS)
            reader = await self._redis.get(slot.reader) or ""
            rows = await self._redis.xrange(slot.usage)
            today = datetime.fromtimestamp((await self._redis.time())[0], UTC).date()
            sums = await self._sums(slot.tenant_id, today, _records(rows), names)
            last = rows[-1][0] if rows else "0-0"
            keys = [slot.usage, slot.reader, slot.leases, *(budget.key(slot) for budget in budgets)]
            days, months = (today - date(1970, 1, 1)).days, today.year * 12 + today.month
            args: list[Argument] = [
                "recount", last, reader, principal.epoch, slot.attempt(""), orjson.dumps(dict(names)),
                str(days), today.isoformat(), str(months), today.isoformat()[:7],
            ]  # fmt: skip
            for budget in budgets:
                args += [budget.period, budget.owner, sums.of(budget)]
            if await self._script(self._redis, keys, args) == "counted":
                if tries >= PATIENCE:
                    await self._redis.delete(slot.counting)
                return
        raise RedisUnavailable(f"the budgets of tenant {slot.tenant_id!r} could not be counted")

    async def _sums(
        self, tenant_id: str, today: date, waiting: Mapping[str, UsageRecord], names: Mapping[str, str]
    ) -> _Sums:
        """What the ledger has, and what of `waiting` it does not have yet, both at one moment."""
        sums = _Sums(names)
        by_key_and_model, known = await self._ledger.month(tenant_id, today, waiting)
        for key_id, model, in_day, in_month in by_key_and_model:
            sums.add(key_id, model, in_day, in_month)
        for attempt_id, record in waiting.items():
            status, tokens = known.get(attempt_id, ("expired", 0))
            more = record.total_tokens - tokens
            day = record.created_at.astimezone(UTC).date()
            if status == "expired" and (attempt_id not in known or record.status != "expired"):
                is_now = (day.year, day.month) == (today.year, today.month)
                sums.add(record.key_id, record.model, more if day == today else 0, more if is_now else 0)
        return sums


class _Sums:
    """Tokens of this day and of this month, by owner."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._tokens: dict[Budget, int] = {}

    def add(self, key_id: str, model: str, in_day: int, in_month: int) -> None:
        target = self._names.get(model, model).partition("@")[0]
        for owner in ("tenant", key_id, f"model:{target}"):
            for period, tokens in (("day", in_day), ("month", in_month)):
                budget = Budget(owner, period)
                self._tokens[budget] = self._tokens.get(budget, 0) + tokens

    def of(self, budget: Budget) -> int:
        return self._tokens.get(budget, 0)


def _records(rows: Iterable[Any]) -> dict[str, UsageRecord]:
    """By attempt; what its worker said before what an expired lease left."""
    found: dict[str, UsageRecord] = {}
    for _, fields in rows:
        try:
            record = msgspec.json.decode(fields["entry"], type=UsageRecord)
        except (msgspec.MsgspecError, KeyError):
            continue  # the flusher puts it aside
        if record.attempt_id not in found or record.status != "expired":
            found[record.attempt_id] = record
    return found
