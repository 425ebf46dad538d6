"""The Lua of quotas against a model in Python: any sequence of holds, top-ups, heartbeats, settlements, expiries,
repeats and changes of limits and their modes, for tenant, keys and models, per minute, day and month, under a clock
that the test moves; on redis-server and on the embedded fallback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tenants.courses import Bucket as QuotaBucket
from tenants.courses import bucket_of
from tenants.gates import Gate, gates
from tenants.keys import Principal
from tenants.limits import BUDGETS, NUMBERS, Limits
from tenants.quotas import Hold, QuotaExceeded, Quotas, Stale
from tenants.slots import TenantSlot
from tenants.state import Client, Script, connect
from tenants.usage import UsageRecord

MINUTE, HOUR = 60_000_000, 3_600_000_000
BEGIN = (1_801_440_000 - 20) * 1_000_000
"""20 s before February 2027, UTC."""
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
    """A bucket of the model: of a rate, or (`window`) of a budget."""

    used: float
    at: int
    limit: int
    window: int | None = None

    def level(self, now: int) -> float:
        return max(0.0, self.used - (now - self.at) * self.limit / MINUTE)

    def level_under(self, now: int, limit: int) -> float:
        used = self.level(now)
        return limit + max(0.0, used - self.limit) if limit < self.limit and used > limit else used


@dataclass
class Attempt:
    """An attempt of the model. `charged_to`: the token buckets that were charged, with the limits at that time."""

    hold: Hold
    key: str
    model: str
    charged_to: dict[str, Gate]
    deadline_ms: int
    used: int
    charged: int
    at: int
    is_leased: bool = True


def window(period: str, us: int) -> int:
    """The calendar day (since 1970) or month (since year 0) of a time."""
    moment = datetime.fromtimestamp(us // 1_000_000, UTC)
    return us // 86_400_000_000 if period == "day" else moment.year * 12 + moment.month


class QuotaMachine(RuleBasedStateMachine):
    """Redis beside the model; after every step they are the same."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis: Client = connect(url)
        self.quotas = Quotas(self.redis, lease_s=10)
        self.quotas._script = with_own_clock(self.quotas._script)
        self.now = BEGIN
        self.epoch = 5
        self.limits = {"tenant": Limits(), "k1": Limits(), "k2": Limits(), "m1": Limits(), "m2": Limits()}
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
            "acme", key, frozenset(), tenant_limits=self.limits["tenant"], key_limits=self.limits[key],
            model_limits={name: self.limits[name] for name in ("m1", "m2")}, epoch=self.epoch,
        )  # fmt: skip

    def leased(self, gate: Gate, key: str, model: str) -> int:
        return sum(
            attempt.is_leased and attempt.deadline_ms > self.now // 1000
            and (gate.scope != "key" or attempt.key == key) and (gate.scope != "model" or attempt.model == model)
            for attempt in self.attempts.values()
        )  # fmt: skip

    def level(self, name: str, gate: Gate, *, under: bool = True) -> float:
        bucket = self.buckets.get(name)
        if bucket is None:
            return 0.0
        if gate.is_budget:
            return bucket.used if bucket.window == window(gate.period, self.now) else 0.0
        return bucket.level_under(self.now, gate.limit or 0) if under else bucket.level(self.now)

    def charge(self, name: str, gate: Gate, used: float, limit: int) -> None:
        if used <= 0 or (gate.is_rate and limit <= 0):
            self.buckets.pop(name, None)
        else:
            at = window(gate.period, self.now) if gate.is_budget else None
            self.buckets[name] = Bucket(used, self.now, limit, at)

    @rule(
        owner=st.sampled_from(["tenant", "k1", "k2", "m1"]), requests=LIMIT, tokens=LIMIT, concurrency=LIMIT,
        day=LIMIT, month=LIMIT, soft=st.sets(st.sampled_from(BUDGETS)), shadow=st.sets(st.sampled_from(NUMBERS)),
        is_lenient=st.booleans(),
    )  # fmt: skip
    def change_limits(
        self, owner: str, requests: int | None, tokens: int | None, concurrency: int | None, day: int | None,
        month: int | None, soft: set[str], shadow: set[str], is_lenient: bool,
    ) -> None:  # fmt: skip
        modes = {"soft": tuple(soft - shadow), "shadow": tuple(shadow)} if is_lenient else {}
        self.limits[owner] = Limits(requests, tokens, concurrency, day, month, **modes)

    @rule(us=st.one_of(st.integers(0, 3), st.integers(1, 20_000_000), st.just(5_000_000)))
    def wait(self, us: int) -> None:
        self.now += us
        self.do(self._tell_time())

    @precondition(lambda self: self.now < BEGIN + 12 * HOUR)  # nobody dead for a day is remembered
    @rule(hours=st.integers(1, 11))
    def wait_long(self, hours: int) -> None:
        self.wait(hours * HOUR)

    @rule(
        key=st.sampled_from(["k1", "k2"]), model=st.sampled_from(["m1", "m2@3"]), prompt=st.integers(1, 3),
        more=st.integers(0, 6), beyond=st.integers(0, 6),
    )  # fmt: skip
    def hold(self, key: str, model: str, prompt: int, more: int, beyond: int) -> None:
        self.count += 1
        record = UsageRecord(
            attempt_id=f"a{self.count}", tenant_id="acme", key_id=key, model=model, prompt_tokens=prompt
        )
        name = model[:2]
        passed = gates(self.limits["tenant"], self.limits[key], self.limits[name], prompt + more)
        names = [bucket_of(gate, self.principal(key), name).key for gate in passed]
        levels = [
            self.leased(gate, key, name) if gate.dimension == "concurrency" else self.level(bucket, gate)
            for bucket, gate in zip(names, passed, strict=True)
        ]
        over = [
            gate.limit is not None and used + gate.cost > gate.limit for gate, used in zip(passed, levels, strict=True)
        ]
        is_refused = any(above and gate.mode == "hard" for above, gate in zip(over, passed, strict=True))
        work = self.quotas.hold(self.principal(key), record, prompt + more, ceiling=prompt + more + beyond)
        try:
            hold = self.do(work)
        except QuotaExceeded as refused:
            assert is_refused
            self._check_refusal(refused, passed, levels)
            return
        assert not is_refused
        assert hold.exceeded == [gate for gate, above in zip(passed, over, strict=True) if above]
        charged_to = {}
        for bucket, gate, used, above in zip(names, passed, levels, over, strict=True):
            if gate.dimension != "concurrency" and not (above and gate.mode == "shadow"):
                self.charge(bucket, gate, used + gate.cost, gate.limit or 0)
                if gate.dimension == "tokens":
                    charged_to[bucket] = gate
        self.attempts[record.attempt_id] = Attempt(
            hold, key, name, charged_to, self.now // 1000 + 10_000, prompt, prompt + more, self.now
        )

    def _check_refusal(self, refused: QuotaExceeded, passed: list[Gate], levels: list[float]) -> None:
        """The refusal names a limit that does refuse, and its wait is right: that long, and no microsecond less."""
        closed = [
            (gate, used) for gate, used in zip(passed, levels, strict=True)
            if gate.refuses(used) and (gate.scope, gate.dimension, gate.period, gate.limit)
            == (refused.scope, refused.dimension, refused.period, refused.limit)
        ]  # fmt: skip
        ((gate, used),) = closed
        if gate.is_budget:
            assert refused.retry_after_s is None
            assert refused.reset_s is not None
            then = self.now + round(refused.reset_s * 1e6) + 1_000
            assert window(gate.period, then) == window(gate.period, self.now) + 1
            return
        assert refused.reset_s is None
        if gate.dimension == "concurrency":
            return
        if refused.retry_after_s is None:
            assert gate.cost > refused.limit
            return
        then_used = Bucket(used, 0, refused.limit).level(round(refused.retry_after_s * 1_000_000) + 1)
        assert then_used + gate.cost <= refused.limit + 1e-6
        early = Bucket(used, 0, refused.limit).level(max(0, round(refused.retry_after_s * 1_000_000) - 2))
        assert refused.retry_after_s < 3e-6 or early + gate.cost > refused.limit

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 50), completion=st.integers(0, 12), more=st.integers(0, 6))
    def top_up(self, index: int, completion: int, more: int) -> None:
        """What a limit refuses is a debt of what was really used; what none refuses is reserved."""
        _, attempt = self._some(index)
        attempt.hold.completion_tokens = completion
        used = attempt.hold.record.prompt_tokens + completion
        more = max(0, min(more, attempt.hold.ceiling - attempt.hold.tokens))
        all_of_it = {bucket.key: bucket for bucket in attempt.hold.buckets}
        gate_of = {key: attempt.charged_to.get(key) for key in all_of_it}
        levels = {key: self._level_of(bucket) for key, bucket in all_of_it.items()}
        is_granted = not any(
            bucket.mode == "hard" and levels[key] + more > bucket.limit for key, bucket in all_of_it.items()
        )
        assert self.do(self.quotas.top_up(attempt.hold, more)) == is_granted
        more = more if is_granted else max(0, used - attempt.charged)
        for key, gate in gate_of.items():
            if gate is not None and more > 0:
                self.charge(key, gate, levels[key] + more, all_of_it[key].limit)
        attempt.charged += more
        attempt.at, attempt.used = self.now, used
        assert attempt.hold.tokens == attempt.charged

    def _level_of(self, bucket: QuotaBucket) -> float:
        name = {"minute": "tokens_per_minute", "day": "tokens_per_day", "month": "tokens_per_month"}[bucket.period]
        return self.level(bucket.key, Gate("tenant", name, bucket.limit))

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
            attempt.charged, attempt.at, attempt.is_leased = attempt.used, self.now, False
            self.entries.append((name, "expired", attempt.used))

    def _correct(self, attempt: Attempt, tokens: int) -> None:
        """A refund goes only to the day or month that was charged."""
        delta = tokens - attempt.charged
        for name, gate in attempt.charged_to.items():
            is_over = gate.is_budget and window(gate.period, attempt.at) != window(gate.period, self.now)
            if delta != 0 and not (delta < 0 and is_over):
                limit = self.buckets[name].limit if name in self.buckets and gate.is_rate else gate.limit or 0
                self.charge(name, gate, self.level(name, gate, under=False) + delta, limit)

    @invariant()
    def redis_is_the_model(self) -> None:
        self.do(self._compare())

    async def _compare(self) -> None:
        for name, bucket in self.buckets.items():
            row = await self.redis.hgetall(name)
            if bucket.window is None:
                assert (float(row["used"]), int(row["at"]), int(row["limit"])) == (bucket.used, bucket.at, bucket.limit)
            else:
                assert (float(row["used"]), int(row["window"])) == (bucket.used, bucket.window)
        assert len(await self.redis.keys("{t:acme}:bucket:*")) == len(self.buckets)
        assert len(await self.redis.keys("{t:acme}:attempt:*")) == len(self.attempts)
        leases = {name: attempt for name, attempt in self.attempts.items() if attempt.is_leased}
        scores = dict(await self.redis.zrange(SLOT.leases, 0, -1, withscores=True))
        assert scores == {name: attempt.deadline_ms for name, attempt in leases.items()}
        for key in ("k1", "k2"):
            members = set(await self.redis.zrange(SLOT.key_leases(key), 0, -1))
            assert members == {name for name, attempt in leases.items() if attempt.key == key}
        for model in ("m1", "m2"):
            members = set(await self.redis.zrange(SLOT.model_leases(model), 0, -1))
            assert members == {name for name, attempt in leases.items() if attempt.model == model}
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
