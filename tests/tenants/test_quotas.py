"""Quotas on a real Redis, in real time: exact over processes, given back after every end, closed when Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tenants.keys import Principal
from tenants.quotas import Hold, QuotaExceeded, Quotas, Stale
from tenants.slots import TenantSlot
from tenants.state import ANSWER_S, Client, RedisUnavailable, connect
from tenants.usage import UsageRecord
from tests.services import RedisServer
from tests.tenants.worker import attempt, prepare, principal, try_holds

SLOT = TenantSlot("acme")
BOUND_S = ANSWER_S + 0.7
"""An answer within ANSWER_S, and room for a loaded machine."""


@pytest.fixture(params=["redis", "memory"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")
    found = connect(url)
    await prepare(found)
    yield found
    await found.aclose()


@pytest.fixture
def quotas(client: Client) -> Quotas:
    return Quotas(client)


async def entries(redis: Client) -> list[UsageRecord]:
    return [msgspec.json.decode(row["entry"], type=UsageRecord) for _, row in await redis.xrange(SLOT.usage)]


def ended(hold: Hold, completion_tokens: int, status: str = "ok") -> UsageRecord:
    return msgspec.structs.replace(hold.record, status=status, completion_tokens=completion_tokens)


async def first_refusal(quotas: Quotas, who: Principal) -> QuotaExceeded:
    for number in range(1000):
        try:
            await quotas.hold(who, attempt(f"first{number}"), 10)
        except QuotaExceeded as refused:
            return refused
    raise AssertionError("nothing was refused")


class Workers:
    """Processes of tests/tenants/worker.py."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self.processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Workers:
        for number in range(self._count):
            command = [sys.executable, "-m", "tests.tenants.worker", self._url, f"w{number}"]
            self.processes.append(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))
        for process in self.processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        return self

    async def __aexit__(self, *_error: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def do(self, order: dict[str, Any]) -> int:
        """All at the same moment. → how many holds passed, over all of them."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
        passed = 0
        for process in self.processes:
            assert process.stdout is not None
            passed += int(await process.stdout.readline())
        return passed


async def test_exact_over_processes(redis_url: str) -> None:
    """QB-01, QB-08: two and four workers with 25 requests each at the same moment, the first of a new tenant: as many
    pass as the limit says (and what flowed back meanwhile), not one more."""
    redis = connect(redis_url)
    cases = [
        ({"tokens_per_minute": 1000}, 100, 10), ({"requests_per_minute": 20}, 1, 20), ({"concurrency": 3}, 1, 3),
        ({"tokens_per_day": 1000}, 100, 10), ({"tokens_per_month": 1000}, 100, 10),
    ]  # fmt: skip
    async with Workers(redis_url, 4) as four, Workers(redis_url, 2) as two:
        for limits, tokens, allowed in cases:
            for workers in (four, two):
                await redis.flushall()
                await prepare(redis)
                started = time.monotonic()
                passed = await workers.do({"holds": 25, "tokens": tokens, "limits": limits, "then": "keep"})
                is_refilled = any(name.endswith("_minute") for name in limits)
                refilled = (time.monotonic() - started) / 60 * allowed if is_refilled else 0
                assert allowed <= passed <= allowed + refilled
    await redis.aclose()


async def test_unused_tokens_come_back(client: Client, quotas: Quotas) -> None:
    """QB-01: what was reserved and not used is free again at once, what was used stays used."""
    who = principal({"tokens_per_minute": 100})
    hold = await quotas.hold(who, attempt("a", 10), 100)
    with pytest.raises(QuotaExceeded):
        await quotas.hold(who, attempt("b", 10), 20)

    await quotas.settle(hold, ended(hold, 20))

    with pytest.raises(QuotaExceeded) as refused:
        await quotas.hold(who, attempt("b", 10), 80)
    assert (refused.value.limit, refused.value.requested) == (100, 80)
    assert 25 <= refused.value.used <= 30
    await quotas.hold(who, attempt("b", 10), 70)


async def test_more_used_than_reserved_is_a_debt(client: Client, quotas: Quotas) -> None:
    """A stream that ran over its reservation is not cut, but the tenant waits it off; a lower limit forgives only
    what was within the old one."""
    who = principal({"tokens_per_minute": 6000})
    hold = await quotas.hold(who, attempt("a", 10), 10)

    await quotas.settle(hold, ended(hold, 8990))

    with pytest.raises(QuotaExceeded) as refused:
        await quotas.hold(who, attempt("b"), 1)
    assert refused.value.retry_after_s == pytest.approx(30, abs=3)
    with pytest.raises(QuotaExceeded) as refused:
        await quotas.hold(principal({"tokens_per_minute": 3000}), attempt("b"), 1)
    assert refused.value.retry_after_s == pytest.approx(60, abs=6)


async def test_refusal_consumes_nothing(client: Client, quotas: Quotas) -> None:
    """QB-15: of five limits, the one that refuses leaves the other four as they were, whichever it is."""
    key_limits = {"requests_per_minute": 1000, "tokens_per_minute": 50, "concurrency": 5}
    who = principal({"requests_per_minute": 3, "tokens_per_minute": 1000}, key_limits=key_limits)

    for number in range(10):
        with pytest.raises(QuotaExceeded) as refused:
            await quotas.hold(who, attempt(f"r{number}"), 51)
        assert (refused.value.scope, refused.value.dimension, refused.value.retry_after_s) == ("key", "tokens", None)

    assert await client.keys("{t:acme}:[^e]*") == []
    for number in range(3):
        await quotas.hold(who, attempt(f"a{number}"), 1)


async def test_limits_are_told_apart(client: Client, quotas: Quotas) -> None:
    """QB-12: a refusal names whose limit and which, with limit, used, requested and the time to wait."""
    cases = [
        (({"requests_per_minute": 2}, {}), ("tenant", "requests", 2, 2, 1), 30),
        (({}, {"tokens_per_minute": 20}), ("key", "tokens", 20, 20, 10), 30),
        (({"concurrency": 2}, {}), ("tenant", "concurrency", 2, 2, 1), 1),
        (({"concurrency": 9}, {"concurrency": 2}), ("key", "concurrency", 2, 2, 1), 1),
        (({"requests_per_minute": 0}, {}), ("tenant", "requests", 0, 0, 1), None),
    ]
    for (tenant, key), told, wait_s in cases:
        await client.flushall()
        await prepare(client)
        who = principal(tenant, key_limits=key)
        refused = await first_refusal(quotas, who)
        found = (refused.scope, refused.dimension, refused.limit, refused.used, refused.requested)
        assert found == told
        assert refused.retry_after_s == (None if wait_s is None else pytest.approx(wait_s, abs=1))


async def test_windows_for_headers(client: Client, quotas: Quotas) -> None:
    """The tightest of tenant and key: limit, remaining after this request, and the time until it is full again;
    nothing for what is unlimited; the same on a refusal."""
    who = principal({"requests_per_minute": 60}, key_limits={"requests_per_minute": 6})

    hold = await quotas.hold(who, attempt("a"), 10)

    assert set(hold.windows) == {"requests"}
    window = hold.windows["requests"]
    assert (window.limit, window.remaining) == (6, 5)
    assert window.reset_s == pytest.approx(10, abs=0.5)
    assert (await first_refusal(quotas, who)).windows["requests"].remaining == 0


async def test_room_is_half_of_every_limit(client: Client, quotas: Quotas) -> None:
    """With this request counted, and only where a limit is enforced."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"concurrency": 1}, False),
        ({"concurrency": 2}, True),
        ({"tokens_per_minute": 20}, True),
        ({"tokens_per_minute": 19}, False),
        ({"tokens_per_day": 19}, False),
        ({"requests_per_minute": 1}, False),
        ({"concurrency": 1, "shadow": ["concurrency"]}, True),
    ]
    for number, (limits, is_roomy) in enumerate(cases):
        await client.flushall()
        await prepare(client)

        hold = await quotas.hold(principal(limits), attempt(f"room{number}"), 10)

        assert hold.is_roomy is is_roomy, limits


async def test_refill_is_continuous(client: Client, quotas: Quotas) -> None:
    """600 a minute are one every 100 ms, not 600 at the full minute."""
    who = principal({"requests_per_minute": 600})
    wait_s = (await first_refusal(quotas, who)).retry_after_s

    assert wait_s is not None
    assert wait_s <= 0.1
    await asyncio.sleep(wait_s + 0.005)
    await quotas.hold(who, attempt("later"), 1)


async def test_every_end_gives_the_lease_back(client: Client) -> None:
    """QB-02: settled, cancelled in hold(), cancelled in settle(), dropped without a word: none keeps its lease."""
    quotas = Quotas(client, lease_s=0.3)
    who = principal({"concurrency": 1})
    hold = await quotas.hold(who, attempt("settled"), 10)
    await quotas.settle(hold, ended(hold, 3))

    hold = await quotas.hold(who, attempt("cancelled"), 10)
    task = asyncio.create_task(quotas.settle(hold, ended(hold, 4, "cancelled")))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await quotas.drain()

    task = asyncio.create_task(quotas.hold(who, attempt("cancelled in hold"), 10))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task  # the embedded fallback was faster than that: a hold that nobody has is one that was dropped
    del task
    gc.collect()
    await quotas.retry()
    await asyncio.sleep(0.35)

    await quotas.hold(who, attempt("dropped"), 10)
    gc.collect()
    await quotas.beat()
    await asyncio.sleep(0.35)
    hold = await quotas.hold(who, attempt("last"), 10)

    assert [(entry.attempt_id, entry.completion_tokens) for entry in await entries(client)] == [
        ("settled", 3), ("cancelled", 4)
    ]  # fmt: skip


async def test_killed_worker_is_billed_at_its_last_heartbeat(redis_url: str) -> None:
    """QB-02, QB-03: kill -9 of a worker in mid-stream: its leases end with their time, its attempts are settled at
    what the last heartbeat said, the rest of the reservation is free, and that once, whoever sweeps."""
    redis = connect(redis_url)
    await prepare(redis)
    lease_s = 3.0  # beats come four times as often
    order = {"holds": 4, "tokens": 50, "prompt_tokens": 7, "completion_tokens": 13, "lease_s": lease_s, "then": "beat",
             "limits": {"concurrency": 4, "tokens_per_minute": 200}}  # fmt: skip
    sweepers = [Quotas(redis), Quotas(redis)]
    async with Workers(redis_url, 1) as workers:
        started = time.monotonic()
        assert await workers.do(order) == 4
        await asyncio.sleep(1.2 * lease_s)
        assert sum([await sweeper.sweep() for sweeper in sweepers]) == 0, "a live worker keeps its leases"
        with pytest.raises(QuotaExceeded, match="concurrency"):
            await sweepers[0].hold(principal({"concurrency": 4}), attempt("new"), 1)
        workers.processes[0].kill()
    await asyncio.sleep(1.1 * lease_s)
    swept = await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))

    assert sum(swept) == 4
    found = await entries(redis)
    assert {(entry.status, entry.prompt_tokens, entry.completion_tokens) for entry in found} == {("expired", 7, 13)}
    assert len({entry.attempt_id for entry in found}) == len(found) == 4
    used = float(await redis.hget(SLOT.bucket("tenant", "tokens"), "used"))
    assert 80 - (time.monotonic() - started) / 60 * 200 <= used <= 80
    await sweepers[0].hold(principal({"concurrency": 1}), attempt("new"), 1)
    await redis.aclose()


async def test_late_settlement_corrects_an_expired_one(client: Client) -> None:
    """A worker that was only slow: its real usage replaces the estimate in the bucket; both entries are in the stream
    (the ledger keeps the real one)."""
    quotas = Quotas(client, lease_s=0.05)
    who = principal({"tokens_per_minute": 1000})
    hold = await quotas.hold(who, attempt("slow", 10), 500)
    await asyncio.sleep(0.06)
    assert await quotas.sweep() == 1
    assert float(await client.hget(SLOT.bucket("tenant", "tokens"), "used")) <= 10

    await quotas.settle(hold, ended(hold, 290))

    assert float(await client.hget(SLOT.bucket("tenant", "tokens"), "used")) == pytest.approx(300, abs=20)
    assert [(entry.status, entry.total_tokens) for entry in await entries(client)] == [("expired", 10), ("ok", 300)]


async def test_stale_principal_holds_nothing(client: Client, quotas: Quotas) -> None:
    """QB-04: when the epoch has moved, or is unknown, hold() says Stale and writes nothing."""
    await client.incr(SLOT.epoch)
    with pytest.raises(Stale):
        await quotas.hold(principal({}), attempt("a"), 1)
    await client.delete(SLOT.epoch)
    with pytest.raises(Stale):
        await quotas.hold(principal({}), attempt("a"), 1)

    assert await client.keys("{t:acme}:*") == []


async def test_script_flush_under_load(redis_url: str) -> None:
    """DB-07: Redis that forgets the script again and again gets it back in the same call: the limit holds, nobody
    sees an error, and nothing is counted in the process."""
    redis = connect(redis_url)
    await prepare(redis)
    quotas = Quotas(redis)
    who = principal({"requests_per_minute": 20})

    async def flush() -> None:
        for _ in range(20):
            await redis.script_flush()
            await asyncio.sleep(0.002)

    async def ask(number: int) -> bool:
        await asyncio.sleep(number * 0.0005)
        try:
            await quotas.hold(who, attempt(f"a{number}"), 1)
        except QuotaExceeded:
            return False
        return True

    started = time.monotonic()
    passed = await asyncio.gather(flush(), *(ask(number) for number in range(100)))

    assert 20 <= sum(filter(None, passed)) <= 20 + (time.monotonic() - started) / 3
    await redis.aclose()


async def test_stopped_redis(own_redis: RedisServer) -> None:
    """DB-02: Redis that hangs: every hold is RedisUnavailable within a second, a settlement is kept without an error;
    when Redis goes on, the settlement is done, and holds that timed out hold nothing."""
    redis = connect(own_redis.url)
    await prepare(redis)
    quotas = Quotas(redis)
    who = principal({"concurrency": 2, "tokens_per_minute": 100})
    running = await quotas.hold(who, attempt("running", 5), 60)

    own_redis.signal(signal.SIGSTOP)
    started = time.perf_counter()
    refused = await asyncio.gather(
        *(quotas.hold(who, attempt(f"a{number}"), 1) for number in range(40)), return_exceptions=True
    )
    hold_s = time.perf_counter() - started
    await quotas.settle(running, ended(running, 20))
    settle_s = time.perf_counter() - started - hold_s
    own_redis.signal(signal.SIGCONT)
    await quotas.retry()

    assert {type(answer) for answer in refused} == {RedisUnavailable}
    assert max(hold_s, settle_s) < BOUND_S
    assert [(entry.attempt_id, entry.total_tokens) for entry in await entries(redis)] == [("running", 25)]
    assert await redis.zcard(SLOT.leases) == 0
    for number in range(2):
        await quotas.hold(who, attempt(f"b{number}", 5), 37)
    await redis.aclose()


async def test_killed_redis(own_redis: RedisServer) -> None:
    """Redis dies by kill -9 with streams running and comes back from its file: no hold passes meanwhile, every ended
    attempt is in the stream, leases are neither lost nor stuck, and what a worker knew of a tenant is asked anew."""
    redis = connect(own_redis.url)
    await prepare(redis)
    quotas = Quotas(redis, lease_s=5)
    who = principal({"concurrency": 3})
    early, late, running = [await quotas.hold(who, attempt(name), 10) for name in ("early", "late", "running")]
    await quotas.settle(early, ended(early, 1))

    own_redis.kill()
    await quotas.settle(late, ended(late, 2))
    with pytest.raises(RedisUnavailable):
        await quotas.hold(who, attempt("meanwhile"), 1)
    own_redis.start()
    await quotas.retry()
    await quotas.beat()

    with pytest.raises(Stale):
        await quotas.hold(who, attempt("after"), 1)
    assert {(entry.attempt_id, entry.completion_tokens) for entry in await entries(redis)} == {
        ("early", 1),
        ("late", 2),
    }
    assert await redis.zrange(SLOT.leases, 0, -1) == ["running"]
    await quotas.settle(running, ended(running, 3))
    assert await redis.zcard(SLOT.leases) == 0
    await redis.aclose()


async def test_redis_that_lost_everything(own_redis: RedisServer) -> None:
    """A Redis without its file: entries of the last seconds are given again, running streams hold their leases again
    after the next heartbeat, limits go on from empty."""
    redis = connect(own_redis.url)
    await prepare(redis)
    quotas = Quotas(redis)
    who = principal({"concurrency": 1})
    settled = await quotas.hold(principal({}), attempt("settled"), 10)
    await quotas.settle(settled, ended(settled, 4))
    running = await quotas.hold(who, attempt("running"), 10)

    own_redis.kill()
    for path in own_redis.directory.glob("appendonlydir/*"):
        path.unlink()
    own_redis.start()
    await quotas.retry()
    await quotas.beat()

    assert [entry.attempt_id for entry in await entries(redis)] == ["settled"]
    assert await redis.zrange(SLOT.leases, 0, -1) == ["running"]
    await quotas.settle(running, ended(running, 5))
    assert [entry.attempt_id for entry in await entries(redis)] == ["settled", "running"]
    await redis.aclose()


async def test_what_redis_never_took_is_handed_over(own_redis: RedisServer) -> None:
    """A worker that stops while Redis is away gets its settlements back, to write them to SQL itself."""
    redis = connect(own_redis.url)
    await prepare(redis)
    quotas = Quotas(redis)
    hold = await quotas.hold(principal({}), attempt("a"), 10)

    own_redis.kill()
    await quotas.settle(hold, ended(hold, 6))

    assert [(record.attempt_id, record.completion_tokens) for record in await quotas.drain()] == [("a", 6)]
    await redis.aclose()


async def test_tenants_do_not_share(client: Client, quotas: Quotas) -> None:
    """One tenant's limit is nobody else's; two keys share their tenant's limit and have their own."""
    await client.set(TenantSlot("other").epoch, 7)
    who = principal({"requests_per_minute": 2}, "k1", {"requests_per_minute": 1})
    await quotas.hold(who, attempt("a"), 1)
    with pytest.raises(QuotaExceeded, match="key limit"):
        await quotas.hold(who, attempt("b"), 1)
    other_key = principal({"requests_per_minute": 2}, "k2")
    await quotas.hold(other_key, attempt("c"), 1)
    with pytest.raises(QuotaExceeded, match="tenant limit"):
        await quotas.hold(other_key, attempt("d"), 1)

    other = msgspec.structs.replace(attempt("e"), tenant_id="other")
    other_principal = type(who)("other", "k9", frozenset(), tenant_limits=who.tenant_limits, epoch=7)
    await quotas.hold(other_principal, other, 1)


async def test_try_holds_counts_in_one_process(client: Client, quotas: Quotas) -> None:
    """QB-01: 50 parallel requests of one worker that reserve 100 of 1000 tokens: ten pass."""
    order = {"name": "w", "holds": 50, "tokens": 100, "limits": {"tokens_per_minute": 1000}}
    assert len(await try_holds(quotas, order)) == 10
