"""Budgets are what the ledger says: whatever becomes of Redis, what was used stays used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tenants.budgets import Budgets, budgets_of
from tenants.db import Database, now
from tenants.directory import TenantDirectory, TenantSpec
from tenants.epochs import Epochs
from tenants.flusher import UsageFlusher
from tenants.key_book import KeySpec
from tenants.keys import KeyRing, Principal
from tenants.limits import Limits
from tenants.quotas import Hold, QuotaExceeded, Quotas, Stale
from tenants.slots import TenantSlot
from tenants.state import Client
from tenants.usage import Tokens, UsageLedger, UsageQuery, UsageRecord
from tests.tenants.conftest import ADMIN

SLOT = TenantSlot("acme")
DAY, MONTH = "tenant:tokens:day", "tenant:tokens:month"


class Worker:
    """One worker's quotas and keys, and a key of acme."""

    def __init__(self, database: Database, redis: Client, keys: KeyRing, key: str) -> None:
        self.redis = redis
        self.quotas = Quotas(redis)
        self.ledger = UsageLedger(database)
        self.flusher = UsageFlusher(redis, self.ledger)
        self.keys = keys
        self.key = key
        self.count = 0

    async def hold(self, tokens: int, model: str = "m", **values: Any) -> Hold:
        """As a request does it: cached, and on Stale once more from the start."""
        self.count += 1
        for check_epoch in (False, True):
            who = await self.keys.authenticate(self.key, check_epoch=check_epoch)
            record = UsageRecord(
                attempt_id=f"{id(self)}-{self.count}", tenant_id="acme", key_id=who.key_id, model=model,
                prompt_tokens=1, **values,
            )  # fmt: skip
            try:
                return await self.quotas.hold(who, record, tokens)
            except Stale:
                if check_epoch:
                    raise
        raise AssertionError

    async def settle(self, hold: Hold, tokens: int) -> None:
        record = msgspec.structs.replace(hold.record, status="ok", completion_tokens=tokens - 1)
        await self.quotas.settle(hold, record)

    async def use(self, tokens: int, **values: Any) -> None:
        await self.settle(await self.hold(tokens, **values), tokens)

    async def used(self, bucket: str = DAY) -> int:
        return int(float(await self.redis.hget(f"{{t:acme}}:bucket:{bucket}", "used") or 0))

    async def principal(self) -> Principal:
        return await self.keys.authenticate(self.key)


@pytest.fixture
async def worker(database: Database, redis: Client, directory: TenantDirectory, keys: KeyRing) -> Worker:
    limits = Limits(tokens_per_day=1000, tokens_per_month=5000)
    await directory.create(TenantSpec(id="acme", limits=limits, model_limits={"m": Limits(tokens_per_day=900)}), ADMIN)
    issued = await keys.issue("acme", KeySpec("k", limits=Limits(tokens_per_month=4000)), ADMIN)
    made = Worker(database, redis, keys, issued.key)
    await made.quotas.retry()
    return made


async def billed(ledger: UsageLedger) -> int:
    [total] = await ledger.sums(UsageQuery(tenant_id="acme"))
    return total.prompt_tokens + total.completion_tokens


async def lose(redis: Client) -> None:
    await redis.flushall()


async def restart(redis: Client) -> None:
    """An empty one in its place: what a worker notices at its next connection."""
    await redis.flushall()
    redis.generation += 1


@pytest.mark.parametrize("loss", [lose, restart])
async def test_a_loss_forgives_nothing(worker: Worker, redis: Client, loss: Callable[[Client], Any]) -> None:
    """DB-07: a budget that is spent is spent after Redis has lost everything: for tenant, key and model, by day and
    month; with entries already in the ledger and entries still on their way, which workers give again."""
    await worker.use(500)
    await worker.flusher.flush()
    await worker.use(300)

    await loss(redis)
    await worker.quotas.retry()

    with pytest.raises(QuotaExceeded) as refused:
        await worker.hold(101)
    assert (refused.value.limit, refused.value.used) == (900, 800)
    hold = await worker.hold(100)
    key_id = hold.record.key_id
    assert [await worker.used(name) for name in (DAY, MONTH, "model:m:tokens:day", f"{key_id}:tokens:month")] == [
        900
    ] * 4
    await worker.settle(hold, 50)
    assert [await worker.used(name) for name in (DAY, MONTH, "model:m:tokens:day", f"{key_id}:tokens:month")] == [
        850
    ] * 4
    await worker.flusher.flush()
    assert await billed(worker.ledger) == 850


async def test_what_runs_at_the_loss_is_counted_when_it_ends(worker: Worker, redis: Client) -> None:
    """An attempt that Redis has forgotten is in the counter from the next request after its end, exactly once, however
    often its settlement is repeated."""
    running = await worker.hold(200)
    await worker.use(100)
    await lose(redis)
    await worker.quotas.retry()
    await worker.use(10)
    assert await worker.used() == 110
    await worker.settle(running, 60)
    await worker.settle(running, 60)
    await worker.quotas.retry()

    await worker.use(5)

    assert await worker.used() == 175


async def test_a_heartbeat_brings_an_attempt_back(worker: Worker, redis: Client) -> None:
    """Its lease counts again; its tokens are charged once, when it ends."""
    running = await worker.hold(200)
    await restart(redis)
    await worker.quotas.retry()
    await worker.use(10)
    await worker.quotas.beat()
    assert await redis.zcard(SLOT.leases) == 1
    await worker.settle(running, 60)
    assert await worker.used() == 70
    assert await redis.zcard(SLOT.leases) == 0


async def test_what_a_dead_worker_and_a_dead_redis_take_with_them(
    worker: Worker, redis: Client, database: Database
) -> None:
    """A worker that dies together with Redis loses what it settled since the last flush, and no more: that is neither
    billed nor counted; counter and ledger agree."""
    await worker.use(400)
    await worker.flusher.flush()
    await worker.use(30)
    await lose(redis)
    successor = Worker(database, redis, worker.keys, worker.key)
    await successor.quotas.retry()

    await successor.use(7)
    await successor.flusher.flush()

    assert await successor.used() == await billed(successor.ledger) == 407


async def test_a_new_budget_knows_what_was_used(worker: Worker, directory: TenantDirectory) -> None:
    """A budget counts the whole day and month, also from before it was set, raised or set again."""
    await directory.patch(
        "acme", {"limits": {"tokens_per_day": None, "tokens_per_month": None}, "model_limits": {}}, ADMIN
    )
    await worker.use(700)
    assert await worker.used() == 0
    await directory.patch("acme", {"limits": {"tokens_per_day": 750}}, ADMIN)
    with pytest.raises(QuotaExceeded):
        await worker.hold(51)
    await worker.use(50)
    await directory.patch("acme", {"limits": {"tokens_per_day": 800}}, ADMIN)
    await worker.use(50)
    assert await worker.used() == 800


async def test_a_correction_gives_back(worker: Worker, epochs: Epochs) -> None:
    """What was billed wrongly and is corrected can be used again."""
    hold = await worker.hold(900)
    await worker.settle(hold, 900)
    await worker.flusher.flush()
    with pytest.raises(QuotaExceeded):
        await worker.hold(200)
    await worker.ledger.correct(hold.record.attempt_id, Tokens(completion=-800), "a mistake", ADMIN)
    await epochs.repair()

    await worker.use(200)

    assert await worker.used() == 300


async def test_only_this_day_and_month_count(worker: Worker, redis: Client) -> None:
    """What was used yesterday or in another month is no part of today's budget."""
    principal = await worker.principal()
    today = now()
    records = [
        UsageRecord(attempt_id=f"old{i}", tenant_id="acme", key_id=principal.key_id, model="m@2", status="ok",
                    prompt_tokens=10**i, created_at=at)
        for i, at in enumerate([today, today - timedelta(days=1), today - timedelta(days=40)])
    ]  # fmt: skip
    await worker.ledger.add(records)
    await lose(redis)
    await worker.use(1)
    is_same_month = (today - timedelta(days=1)).month == today.month
    assert await worker.used() == 2
    assert await worker.used("model:m:tokens:day") == 2
    assert await worker.used(MONTH) == (12 if is_same_month else 2)


async def test_counting_while_all_goes_on(worker: Worker, redis: Client, database: Database) -> None:
    """Counted again and again while requests come and end, and two flushers write: when all is done, the counter is the
    sum of what was used. Between two moments nothing is lost or counted twice."""
    budgets, generator, total = Budgets(database, redis), random.Random(7), 0
    who = await worker.principal()
    is_over = False

    async def keep(work: Callable[[], Any], pause_s: float) -> None:
        while not is_over:
            await work()
            await asyncio.sleep(pause_s)

    async def count() -> None:
        budgets._ensured.clear()
        await redis.hdel(f"{{t:acme}}:bucket:{DAY}", "counted")
        await budgets.ensure(who)

    async def request(number: int) -> int:
        tokens = generator.randint(1, 5)
        hold = await worker.hold(tokens + 3)
        await asyncio.sleep(generator.random() / 50)
        await worker.settle(hold, tokens)
        return tokens

    others = [
        asyncio.create_task(keep(count, 0.002)),
        *(asyncio.create_task(keep(worker.flusher.flush, 0.005)) for _ in "12"),
    ]
    for _ in range(15):
        total += sum(await asyncio.gather(*(request(i) for i in range(6))))
        assert await worker.used() == total
    is_over = True
    await asyncio.gather(*others)
    assert await worker.used() == total


async def test_counting_ends_beside_flushers_that_never_rest(
    worker: Worker, redis: Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the ledger is summed, a flusher always begins: it is made to wait, and then writes what waited."""
    await worker.use(30)
    hold = await worker.hold(5)
    await worker.settle(hold, 4)
    month = UsageLedger.month

    async def beside_a_flusher(*args: Any) -> Any:
        await worker.flusher.flush()
        return await month(*args)

    monkeypatch.setattr(UsageLedger, "month", beside_a_flusher)
    await redis.hdel(f"{{t:acme}}:bucket:{DAY}", "counted")

    await Budgets(database, redis).ensure(await worker.principal())

    assert await worker.used() == 34
    await worker.use(2)
    assert await worker.flusher.flush() == 1
    assert await worker.used() == 36


def test_shadow_budgets_are_left_alone() -> None:
    """A budget in shadow mode is tried out: it counts from then on."""
    limits = Limits(tokens_per_day=1, tokens_per_month=2, shadow=("tokens_per_month",))
    who = replace(Principal("acme", "k", frozenset()), tenant_limits=limits, model_limits={"m": limits})
    assert [(budget.owner, budget.period) for budget in budgets_of(who)] == [("tenant", "day"), ("model:m", "day")]
