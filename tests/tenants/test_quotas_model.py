"""The Lua of quotas against a model in Python: any sequence of holds, heartbeats, settlements, expiries, repeats and
changes of limits, under a clock that the test moves; on redis-server and on the embedded fallback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tenants.keys import Principal
from tenants.limits import Limits
from tenants.quotas import Hold, QuotaExceeded, Quotas, Stale
from tenants.slots import TenantSlot
from tenants.state import Client, Script, connect
from tenants.usage import UsageRecord

MINUTE = 60_000_000
SLOT = TenantSlot("acme")
CLOCK = "{t:acme}:clock"
LIMIT = st.one_of(st.none(), st.integers(0, 12))
IS_CI = os.environ.get("CI", "") not in ("", "0", "false")


def with_own_clock(script: Script) -> Script:
    """The same script, except that time is the test's and nothing expires while it does not move."""
    text = script.text
    for real, ours in (
        ("redis.call('TIME')", f"redis.call('HMGET', '{CLOCK}', 's', 'us')"),
        ("redis.call('PEXPIRE', ", "redis.call('EXISTS', "),
    ):
        assert real in text
        text = text.replace(real, ours)
    return Script(text)


@dataclass(frozen=True)
class Bucket:
    """A bucket of the model."""

    used: float
    at: int
    limit: int

    def level(self, now: int) -> float:
        return max(0.0, self.used - (now - self.at) * self.limit / MINUTE)

    def level_under(self, now: int, limit: int) -> float:
        used = self.level(now)
        return limit + max(0.0, used - self.limit) if limit < self.limit and used > limit else used


@dataclass
class Attempt:
    """An attempt of the model."""

    hold: Hold
    key: str
    token_buckets: list[str]
    limits: list[int]
    deadline_ms: int
    used: int
    charged: int
    is_leased: bool = True


class QuotaMachine(RuleBasedStateMachine):
    """Redis beside the model; after every step they are the same."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis: Client = connect(url)
        self.quotas = Quotas(self.redis, lease_s=10)
        self.quotas._script = with_own_clock(self.quotas._script)
        self.now = 1_800_000_000_000_000
        self.epoch = 5
        self.limits = {"tenant": Limits(), "k1": Limits(), "k2": Limits()}
        self.buckets: dict[str, Bucket] = {}
        self.attempts: dict[str, Attempt] = {}
        self.entries: list[tuple[str, str, int]] = []
        self.count = 0
        self.do(self._reset())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _reset(self) -> None:
        await self.redis.flushall()
        await self.redis.set(SLOT.epoch, self.epoch)
        await self._tell_time()

    async def _tell_time(self) -> None:
        await self.redis.hset(CLOCK, mapping={"s": self.now // 1_000_000, "us": self.now % 1_000_000})

    def teardown(self) -> None:
        self.do(self.redis.aclose())
        self.runner.close()

    def principal(self, key: str) -> Principal:
        return Principal(
            "acme", key, frozenset(), tenant_limits=self.limits["tenant"], key_limits=self.limits[key], epoch=self.epoch
        )

    def leased(self, key: str | None) -> int:
        return sum(
            attempt.is_leased and attempt.deadline_ms > self.now // 1000 and key in (None, attempt.key)
            for attempt in self.attempts.values()
        )

    @rule(owner=st.sampled_from(["tenant", "k1", "k2"]), requests=LIMIT, tokens=LIMIT, concurrency=LIMIT)
    def change_limits(self, owner: str, requests: int | None, tokens: int | None, concurrency: int | None) -> None:
        self.limits[owner] = Limits(requests, tokens, concurrency)

    @rule(us=st.one_of(st.integers(0, 3), st.integers(1, 20_000_000), st.just(5_000_000)))
    def wait(self, us: int) -> None:
        self.now += us
        self.do(self._tell_time())

    @rule(key=st.sampled_from(["k1", "k2"]), prompt=st.integers(1, 3), more=st.integers(0, 6))
    def hold(self, key: str, prompt: int, more: int) -> None:
        self.count += 1
        record = UsageRecord(attempt_id=f"a{self.count}", tenant_id="acme", key_id=key, model="m", prompt_tokens=prompt)
        cost = {"requests": 1, "tokens": prompt + more}
        levels, is_refused = {}, False
        for owner in ("tenant", key):
            limits = self.limits[owner]
            if limits.concurrency is not None:
                is_refused |= self.leased(None if owner == "tenant" else key) + 1 > limits.concurrency
            for dimension, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
                if limit is None:
                    continue
                bucket = self.buckets.get(f"{owner}:{dimension}")
                used = bucket.level_under(self.now, limit) if bucket else 0.0
                levels[f"{owner}:{dimension}"] = used
                is_refused |= used + cost[dimension] > limit
        try:
            hold = self.do(self.quotas.hold(self.principal(key), record, prompt + more))
        except QuotaExceeded as refused:
            assert is_refused
            self._check_refusal(refused, key, levels, cost)
            return
        assert not is_refused
        for name, used in levels.items():
            owner, dimension = name.split(":")
            limit = getattr(self.limits[owner], f"{dimension}_per_minute")
            self.buckets[name] = Bucket(used + cost[dimension], self.now, limit)
        token_buckets = [name for name in levels if name.endswith(":tokens")]
        self.attempts[record.attempt_id] = Attempt(
            hold, key, token_buckets, [self.buckets[name].limit for name in token_buckets],
            self.now // 1000 + 10_000, prompt, prompt + more,
        )  # fmt: skip

    def _check_refusal(self, refused: QuotaExceeded, key: str, levels: dict[str, float], cost: dict[str, int]) -> None:
        """The refusal names a limit that does refuse, and its wait is right: that long, and no microsecond less."""
        owner = "tenant" if refused.scope == "tenant" else key
        if refused.dimension == "concurrency":
            assert refused.limit == self.limits[owner].concurrency
            return
        assert refused.limit == getattr(self.limits[owner], f"{refused.dimension}_per_minute")
        used = levels[f"{owner}:{refused.dimension}"]
        if refused.retry_after_s is None:
            assert cost[refused.dimension] > refused.limit
            return
        then = Bucket(used, 0, refused.limit).level(round(refused.retry_after_s * 1_000_000) + 1)
        assert then + cost[refused.dimension] <= refused.limit + 1e-6
        early = Bucket(used, 0, refused.limit).level(max(0, round(refused.retry_after_s * 1_000_000) - 2))
        assert refused.retry_after_s < 3e-6 or early + cost[refused.dimension] > refused.limit

    def _some(self, index: int) -> tuple[str, Attempt]:
        names = sorted(self.attempts)
        name = names[index % len(names)]
        return name, self.attempts[name]

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50))
    def hold_again(self, index: int) -> None:
        """A repeated hold changes nothing, whatever the limits are by now."""
        _, attempt = self._some(index)
        self.do(self.quotas.hold(self.principal(attempt.key), attempt.hold.record, attempt.hold.tokens))

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50))
    def hold_stale(self, index: int) -> None:
        """Another epoch writes nothing."""
        _, attempt = self._some(index)
        stale = replace(self.principal(attempt.key), epoch=self.epoch - 1)
        record = msgspec.structs.replace(attempt.hold.record, attempt_id="stale")
        with pytest.raises(Stale):
            self.do(self.quotas.hold(stale, record, 1))

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50), completion=st.integers(0, 8))
    def beat(self, index: int, completion: int) -> None:
        _, attempt = self._some(index)
        attempt.hold.completion_tokens = completion
        self.do(self.quotas._beat([attempt.hold]))
        attempt.used = attempt.hold.record.prompt_tokens + completion
        attempt.deadline_ms = self.now // 1000 + 10_000
        attempt.is_leased = True

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50), completion=st.integers(0, 30), repeats=st.integers(1, 2))
    def settle(self, index: int, completion: int, repeats: int) -> None:
        """Tokens are corrected and the lease released once; the entry may come twice, it is the same."""
        name, attempt = self._some(index)
        record = msgspec.structs.replace(attempt.hold.record, status="ok", completion_tokens=completion)
        for _ in range(repeats):
            self.do(self.quotas.settle(attempt.hold, record))
            self.entries.append((name, "ok", record.total_tokens))
        self._correct(attempt, record.total_tokens)
        del self.attempts[name]

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50))
    def undo(self, index: int) -> None:
        name, attempt = self._some(index)
        self.do(self.quotas._settle(attempt.hold, None))
        self._correct(attempt, 0)
        del self.attempts[name]

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50))
    def expire(self, index: int) -> None:
        """Only a lease that ran out is settled, at the tokens of its last heartbeat; a settlement may follow."""
        name, attempt = self._some(index)
        is_due = attempt.is_leased and attempt.deadline_ms <= self.now // 1000
        assert self.do(self.quotas._expire(SLOT, name)) == is_due
        if is_due:
            self._correct(attempt, attempt.used)
            attempt.charged, attempt.is_leased = attempt.used, False
            self.entries.append((name, "expired", attempt.used))

    def _correct(self, attempt: Attempt, tokens: int) -> None:
        delta = tokens - attempt.charged
        for name, limit in zip(attempt.token_buckets, attempt.limits, strict=True):
            bucket = self.buckets.get(name, Bucket(0.0, self.now, limit))
            if delta != 0:
                self._put(name, Bucket(bucket.level(self.now) + delta, self.now, bucket.limit))

    def _put(self, name: str, bucket: Bucket) -> None:
        if bucket.used <= 0:
            self.buckets.pop(name, None)
        else:
            self.buckets[name] = bucket

    @invariant()
    def redis_is_the_model(self) -> None:
        self.do(self._compare())

    async def _compare(self) -> None:
        for name, bucket in self.buckets.items():
            row = await self.redis.hgetall(SLOT.bucket(*name.split(":")))
            assert (float(row["used"]), int(row["at"]), int(row["limit"])) == (bucket.used, bucket.at, bucket.limit)
        assert len(await self.redis.keys("{t:acme}:bucket:*")) == len(self.buckets)
        assert len(await self.redis.keys("{t:acme}:attempt:*")) == len(self.attempts)
        leases = {name: attempt for name, attempt in self.attempts.items() if attempt.is_leased}
        scores = dict(await self.redis.zrange(SLOT.leases, 0, -1, withscores=True))
        assert scores == {name: attempt.deadline_ms for name, attempt in leases.items()}
        for key in ("k1", "k2"):
            members = set(await self.redis.zrange(SLOT.key_leases(key), 0, -1))
            assert members == {name for name, attempt in leases.items() if attempt.key == key}
        stream = [msgspec.json.decode(row["entry"], type=UsageRecord) for _, row in await self.redis.xrange(SLOT.usage)]
        assert [(entry.attempt_id, entry.status, entry.total_tokens) for entry in stream] == self.entries


def _run(machine: Callable[[], RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * (10 if IS_CI else 1), stateful_step_count=40, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_lua_is_the_model_on_redis(redis_url: str) -> None:
    """QB-01, QB-02, QB-15: on redis-server, every reply and every key is what the model says: the strictest limit
    refuses and nothing is consumed, leases and tokens come back exactly once."""
    _run(partial(QuotaMachine, redis_url), 40)


def test_lua_is_the_model_in_memory() -> None:
    """The embedded fallback runs the same script with the same outcome."""
    _run(partial(QuotaMachine, "memory://"), 8)
