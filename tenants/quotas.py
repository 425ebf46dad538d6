"""Limits per tenant, key and model, exact over all workers: hold() before the work, settle() after it, always.

    QuotaExceeded      (tenants.gates) a limit refuses; nothing was consumed
    Stale              what the worker knows of the tenant is out of date: authenticate again, then hold again

Between the two a lease in Redis is kept alive by beat(); that of a dead worker runs out, and sweep() settles it at the
tokens of its last heartbeat. tenants.upkeep calls beat(), retry() and sweep().
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
from redis.exceptions import NoScriptError, RedisError

from tenants.courses import Course, course_of
from tenants.epochs import move
from tenants.gates import QuotaExceeded, Window, refusal
from tenants.holds import Blob, Hold
from tenants.keys import Principal
from tenants.slots import ACTIVE, LIFE, TenantSlot
from tenants.state import Argument, Client, RedisUnavailable, Script
from tenants.usage import UsageRecord

__all__ = ["Hold", "QuotaExceeded", "Quotas", "Stale", "Window"]

log = logging.getLogger(__name__)

LEASE_S = 20.0
"""A lease without a heartbeat ends after this time."""
TOUCH_S = 60.0
"""How often a worker says that a tenant is active."""
FORGET_S = 600.0
"""An inactive tenant without leases or unwritten usage is no longer swept after this time."""
REPEAT_S = 5.0
"""Usage entries younger than this are given again to a Redis that was restarted: it may have lost them."""
_BATCH = 50


class Stale(Exception):
    """The tenant's epoch has moved since the principal was read."""


class Quotas:
    """Holds, heartbeats and settlements of one worker."""

    def __init__(self, redis: Client, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._redis = redis
        self._script = Script(Path(__file__).with_name("quotas.lua").read_text())
        self._live: WeakValueDictionary[str, Hold] = WeakValueDictionary()
        self._kept: dict[str, tuple[Hold, UsageRecord | None]] = {}
        self._settling: set[asyncio.Future[None]] = set()
        self._recent: deque[tuple[float, Hold, bytes]] = deque()
        self._doubtful: set[str] = set()
        self._life = ""
        self._touched: dict[str, float] = {}
        self._generation = redis.generation

    # -- the way of a request

    async def hold(
        self, principal: Principal, record: UsageRecord, tokens: int, *, ceiling: int = 0, model: str = ""
    ) -> Hold:
        """Reserve one request, `tokens` tokens (prompt included) and one lease under every limit, or nothing.

        record: the attempt, with its prompt counted. Repeating it with the same attempt_id is harmless.
        ceiling: more tokens than `tokens` that it may come to, if they are not all reserved: see top_up().
        model: whose limits count, if that is not record.model without its version.
        Raises QuotaExceeded, Stale, RedisUnavailable.
        """
        record = record.cleaned()
        model = model or record.model.partition("@")[0]
        course = course_of(principal, model)
        gates = course.gates_for(tokens)
        hold = Hold(record, model, tokens, max(ceiling, tokens), course.buckets, self._redis.generation)
        if self._touched.get(principal.tenant_id, 0.0) < time.monotonic() - TOUCH_S:
            await self._touch(principal.tenant_id)
        try:
            reply = await self._call_hold(principal, hold, course)
        except (RedisUnavailable, asyncio.CancelledError):
            self._kept[record.attempt_id] = (hold, None)  # it may have been done: retry() will undo it
            raise
        if reply[0] == "stale":
            raise Stale(f"tenant {principal.tenant_id!r} has changed")
        if self._redis.generation != principal.generation:  # this is another Redis: its epoch says nothing
            await self._settle(hold, None)
            raise Stale("Redis was restarted")
        self._kept.pop(record.attempt_id, None)
        passed = [(gate, float(level)) for gate, level in zip(gates, reply[2:], strict=True)]
        if reply[0] == "refused":
            raise refusal(passed, float(reply[1]) / 1e6)
        hold.passed = passed
        if course.lets_through:
            hold.exceeded = [gate for gate, level in passed if gate.exceeds(level)]
        for gate in hold.exceeded:
            log.info(
                "tenant %s, key %s, model %s: above the %s limit of %s (%s: %d); let through",
                principal.tenant_id, principal.key_id, model, gate.mode, gate.scope, gate, gate.limit,
            )  # fmt: skip
        self._live[record.attempt_id] = hold
        return hold

    async def top_up(self, hold: Hold, more: int) -> bool:
        """Reserve `more` tokens for an attempt that runs on, up to its ceiling. → False if a limit refuses that: then
        what was used beyond the reservation is charged as a debt, and the attempt goes on. Raises RedisUnavailable.
        """
        args: list[Argument] = ["topup", hold.used_tokens, max(0, min(more, hold.ceiling - hold.tokens))]
        for bucket in hold.buckets:
            args += [bucket.period, bucket.limit, bucket.mode]
        keys = [hold.lease_keys[0], *(bucket.key for bucket in hold.buckets)]
        answer, charged = await self._script(self._redis, keys, args)
        if answer != "gone":
            hold.tokens = int(charged)
        return bool(answer == "granted")

    async def settle(self, hold: Hold, record: UsageRecord) -> None:
        """Release the lease, correct the tokens to record.total_tokens and append the usage entry.

        Never raises for an outage: it is kept and retried. Goes on if the caller is cancelled. Harmless to repeat.
        """
        await asyncio.shield(self.settling(hold, record))

    def settling(self, hold: Hold, record: UsageRecord) -> asyncio.Future[None]:
        """As settle(), which is under way when this returns. Not to be cancelled."""
        self._live.pop(record.attempt_id, None)
        record = record.cleaned()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settling.add(done)
        done.add_done_callback(self._settling.discard)
        answer = self._script.send(self._redis, *self._settlement(hold, record))
        answer.add_done_callback(partial(self._settled, hold, record, done))
        return done

    def _settled(
        self, hold: Hold, record: UsageRecord, done: asyncio.Future[None], answer: asyncio.Future[str]
    ) -> None:
        error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        if error is None:
            self._doubt(hold, answer.result())
            return done.set_result(None)
        self._kept[record.attempt_id] = (hold, record)
        if isinstance(error, NoScriptError):
            again = asyncio.ensure_future(self._settle_again(record.attempt_id))
            again.add_done_callback(lambda _: done.set_result(None))
        else:
            log.warning("settlement of %s is kept until Redis takes it: %s", record.attempt_id, error)
            done.set_result(None)

    async def _settle_again(self, attempt_id: str) -> None:
        with suppress(RedisUnavailable):
            await self._settle_kept(attempt_id)

    # -- upkeep

    async def beat(self) -> None:
        """A heartbeat for every live hold. Raises RedisUnavailable."""
        by_tenant: dict[str, list[Hold]] = {}
        for hold in list(self._live.values()):
            by_tenant.setdefault(hold.record.tenant_id, []).append(hold)
        for tenant_id, holds in by_tenant.items():
            await self._touch(tenant_id)
            for start in range(0, len(holds), _BATCH):
                await self._beat(holds[start : start + _BATCH])

    async def retry(self) -> None:
        """Settle what was kept; give a Redis that lost something the latest entries again, and have budgets counted
        anew where they can't be trusted. Raises RedisUnavailable."""
        started = time.monotonic()
        await self._look()  # whatever was sent before an outage has now been done or is lost
        if self._redis.generation != self._generation:
            self._touched.clear()
            for _, hold, entry in list(self._recent):
                await self._touch(hold.slot.tenant_id)
                await self._redis.xadd(hold.slot.usage, {"entry": entry})
                if hold.has_budgets:
                    self._doubtful.add(hold.slot.tenant_id)
            self._generation = self._redis.generation
        while self._recent and self._recent[0][0] < started - REPEAT_S:
            self._recent.popleft()
        for attempt_id in list(self._kept):
            await self._settle_kept(attempt_id)
        while self._doubtful:
            await move(self._redis, [tenant_id := next(iter(self._doubtful))])
            self._doubtful.discard(tenant_id)

    async def _look(self) -> None:
        """Has Redis lost everything, although it is the same server?"""
        made = secrets.token_hex(8)
        await self._redis.set(LIFE, made, nx=True)
        life: str = await self._redis.get(LIFE) or made
        if self._life not in ("", life):
            self._redis.generation += 1
        self._life = life

    async def sweep(self) -> int:
        """Settle every expired lease of every tenant. → how many. Raises RedisUnavailable."""
        seconds, microseconds = await self._redis.time()
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        tenants: list[tuple[str, float]] = await self._redis.zrange(ACTIVE, 0, -1, withscores=True)
        pipe = self._redis.pipeline(transaction=False)
        for tenant_id, _ in tenants:
            pipe.zrangebyscore(TenantSlot(tenant_id).leases, "-inf", now_ms)
        swept = 0
        for (tenant_id, seen_at), expired in zip(tenants, await pipe.execute() if tenants else [], strict=True):
            for attempt_id in expired:
                swept += await self._expire(TenantSlot(tenant_id), attempt_id)
            if not expired and seen_at < time.time() - FORGET_S:
                await self._forget(TenantSlot(tenant_id))
        return swept

    async def drain(self) -> list[UsageRecord]:
        """Settle what is on its way or kept. → what Redis does not take: it is the caller's now."""
        if self._settling:
            await asyncio.wait(set(self._settling))
        with suppress(RedisUnavailable, RedisError):
            await self.retry()
        kept = [record for _, record in self._kept.values() if record is not None]
        self._kept.clear()
        return kept

    # -- the calls

    async def _call_hold(self, principal: Principal, hold: Hold, course: Course) -> list[str]:
        record = hold.record
        keys = [hold.slot.epoch, *hold.lease_keys, *course.bucket_keys]
        args: list[Argument] = [
            "hold", record.attempt_id, principal.epoch, int(self.lease_s * 1000),
            hold.blob, record.prompt_tokens, hold.tokens, *course.args_for(hold.tokens),
        ]  # fmt: skip
        reply: list[str] = await self._script(self._redis, keys, args)
        return reply

    async def _beat(self, holds: Sequence[Hold]) -> None:
        keys: list[str] = []
        args: list[Argument] = ["beat", int(self.lease_s * 1000)]
        generation = self._redis.generation
        for hold in holds:
            keys += hold.lease_keys
            is_lost = hold.generation != generation
            args += [hold.record.attempt_id, hold.used_tokens, int(is_lost), hold.blob if is_lost else b""]
        await self._script(self._redis, keys, args)
        for hold in holds:
            hold.generation = generation

    async def _settle_kept(self, attempt_id: str) -> None:
        """Raises RedisUnavailable."""
        hold, record = self._kept[attempt_id]
        try:
            await self._settle(hold, record)
        except RedisError:
            log.exception("settlement of %s is still kept", attempt_id)
        else:
            self._kept.pop(attempt_id, None)

    async def _settle(self, hold: Hold, record: UsageRecord | None) -> None:
        """End the attempt as `record` says; None = undo the hold, as if it had never been."""
        outcome = await self._script(self._redis, *self._settlement(hold, record))
        if record is not None:
            self._doubt(hold, outcome)

    def _doubt(self, hold: Hold, outcome: str) -> None:
        """Did Redis know nothing of the attempt? Then its tenant's budgets are to be counted anew."""
        if outcome == "unknown" and hold.has_budgets:
            self._doubtful.add(hold.slot.tenant_id)

    def _settlement(self, hold: Hold, record: UsageRecord | None, how: str = "end") -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV."""
        entry = b"" if record is None else msgspec.json.encode(record)
        if entry and how == "end":
            self._recent.append((time.monotonic(), hold, entry))
        tokens = 0 if record is None else record.total_tokens
        keys = [*hold.lease_keys, hold.slot.usage, *(bucket.key for bucket in hold.buckets)]
        args: list[Argument] = ["settle", hold.record.attempt_id, how, tokens, entry]
        for bucket in hold.buckets:
            args += [bucket.period, bucket.limit]
        return keys, args

    async def _expire(self, slot: TenantSlot, attempt_id: str) -> int:
        blob, used = await self._redis.hmget(slot.attempt(attempt_id), ["blob", "used"])
        if blob is None:  # settled between two calls, or lost with an old Redis
            await self._redis.zrem(slot.leases, attempt_id)
            return 0
        found = msgspec.json.decode(blob, type=Blob)
        hold = Hold(found.record, found.model, 0, 0, found.buckets, 0)
        completion_tokens = max(0, int(used) - found.record.prompt_tokens)
        record = msgspec.structs.replace(found.record, status="expired", completion_tokens=completion_tokens)
        return int(await self._script(self._redis, *self._settlement(hold, record, "expire")) == "settled")

    async def _touch(self, tenant_id: str) -> None:
        """Put the tenant where sweep() looks, before there is anything to find."""
        if self._touched.get(tenant_id, 0.0) < time.monotonic() - TOUCH_S:
            await self._redis.zadd(ACTIVE, {tenant_id: time.time()})
            self._touched[tenant_id] = time.monotonic()

    async def _forget(self, slot: TenantSlot) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.zcard(slot.leases)
        pipe.xlen(slot.usage)
        if not any(await pipe.execute()):
            await self._redis.zrem(ACTIVE, slot.tenant_id)
