"""The ledger: each attempt exactly once, whatever dies on the way from Redis to SQL; sums that add up."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tenants.db import Database, DatabaseUnavailable
from tenants.epochs import Epochs
from tenants.flusher import UsageFlusher
from tenants.quotas import Quotas
from tenants.slots import ACTIVE, TenantSlot
from tenants.state import Client, RedisUnavailable, connect
from tenants.upkeep import Upkeep
from tenants.usage import Tokens, UsageLedger, UsageQuery, UsageRecord
from tests.services import RedisServer
from tests.tenants.conftest import ADMIN
from tests.tenants.worker import attempt, prepare, principal

DAY = datetime(2026, 3, 1, 23, 59, tzinfo=UTC)
FLUSH_FOREVER = """
import asyncio, sys
from tenants.db import Database
from tenants.flusher import UsageFlusher
from tenants.state import connect
from tenants.usage import UsageLedger

async def main():
    redis = connect(sys.argv[1])
    flusher = UsageFlusher(redis, UsageLedger(Database(sys.argv[2])))
    print("up", flush=True)
    while True:
        await flusher.flush()

asyncio.run(main())
"""


@pytest.fixture
def ledger(database: Database) -> UsageLedger:
    return UsageLedger(database)


@pytest.fixture
async def flusher(redis: Client, ledger: UsageLedger) -> UsageFlusher:
    await prepare(redis)
    return UsageFlusher(redis, ledger)


def done(name: str, **values: Any) -> UsageRecord:
    return attempt(name, **{"status": "ok", "prompt_tokens": 3, "completion_tokens": 4, **values})


async def use(redis: Client, tenant_id: str, records: list[UsageRecord]) -> None:
    """What settlements leave in Redis."""
    await redis.zadd(ACTIVE, {tenant_id: 1})
    for record in records:
        await redis.xadd(TenantSlot(tenant_id).usage, {"entry": msgspec.json.encode(record)})


async def test_entry_is_written_whole(ledger: UsageLedger) -> None:
    """Every field of a record is in its row, times in UTC, the day that of UTC."""
    full = UsageRecord(
        attempt_id="a", tenant_id="acme", key_id="k", model="pirate@2", request_id="r", adapter="d" * 64,
        adapter_version=2, endpoint="/v1/chat/completions", status="cancelled", prompt_tokens=1, cached_tokens=2,
        completion_tokens=3, queue_s=0.1, first_token_s=0.2, total_s=0.3, user="u", tags={"team": "x"},
        created_at=DAY.astimezone(),
    )  # fmt: skip
    await ledger.add([full])

    row = await ledger.get("a")

    assert row is not None
    assert {name: getattr(row, name) for name in msgspec.structs.asdict(full)} == msgspec.structs.asdict(full)
    assert row.day == DAY.date()


async def test_writing_twice_counts_once(ledger: UsageLedger) -> None:
    """The same entry again, in one batch or in two, changes nothing."""
    await ledger.add([done("a"), done("a"), done("b")])
    await ledger.add([done("a", completion_tokens=99)])

    [total] = await ledger.sums(UsageQuery())

    assert (total.attempts, total.prompt_tokens, total.completion_tokens) == (2, 6, 8)


@pytest.mark.parametrize("is_late", [False, True])
async def test_real_usage_replaces_an_estimate(ledger: UsageLedger, is_late: bool) -> None:
    """The entry of an expired lease gives way to the worker's own, whichever is written first."""
    entries = [attempt("a", completion_tokens=1), done("a", completion_tokens=50)]
    for entry in entries if is_late else reversed(entries):
        await ledger.add([entry])

    row = await ledger.get("a")

    assert row is not None
    assert (row.status, row.completion_tokens) == ("ok", 50)


async def test_texts_that_databases_refuse(redis: Client, flusher: UsageFlusher, ledger: UsageLedger) -> None:
    """NUL, lone surrogates and endless strings from a client neither break the settlement nor block the flusher."""
    quotas = Quotas(redis)
    dirty = attempt("a", user="x\0\ud800", request_id="r" * 9999, tags={"k\0": "\udfff\0"})
    hold = await quotas.hold(principal({}), dirty, 5)
    await quotas.settle(hold, msgspec.structs.replace(dirty, status="ok"))
    await flusher.flush()

    row = await ledger.get("a")

    assert row is not None
    assert (row.user, len(row.request_id), row.tags) == ("x??", 512, {"k?": "??"})


async def test_flush_moves_everything_once(redis: Client, flusher: UsageFlusher, ledger: UsageLedger) -> None:
    """More entries than one round takes, of several tenants: all are in the ledger, the streams are empty."""
    for tenant_id in ("a", "b"):
        await use(redis, tenant_id, [done(f"{tenant_id}{i}", tenant_id=tenant_id) for i in range(700)])

    assert await flusher.flush() == 1400
    assert await flusher.flush() == 0

    assert [(total.group["tenant"], total.attempts) for total in await ledger.sums(UsageQuery(), ["tenant"])] == [
        ("a", 700), ("b", 700)
    ]  # fmt: skip


async def test_sql_away_keeps_entries(redis: Client, flusher: UsageFlusher, ledger: UsageLedger) -> None:
    """DB-04: a flush that SQL does not take leaves the stream as it is; the next one writes it."""
    await use(redis, "acme", [done("a")])
    add = ledger.add

    async def away(_records: object) -> None:
        raise DatabaseUnavailable("away")

    ledger.add = away  # type: ignore[method-assign, assignment]
    with pytest.raises(DatabaseUnavailable):
        await flusher.flush()
    assert await redis.xlen(TenantSlot("acme").usage) == 1
    ledger.add = add  # type: ignore[method-assign]

    assert await flusher.flush() == 1
    assert await ledger.get("a") is not None


async def test_death_between_commit_and_delete(
    redis: Client, flusher: UsageFlusher, ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flusher that dies after its commit leaves entries that another writes again: once in the ledger."""
    await use(redis, "acme", [done("a"), done("b")])

    async def died(*_arguments: object) -> None:
        raise RedisUnavailable("died")

    with monkeypatch.context() as patched:
        add = ledger.add

        async def add_and_die(records: Any) -> None:
            await add(records)
            await died()

        patched.setattr(ledger, "add", add_and_die)
        with pytest.raises(RedisUnavailable):
            await flusher.flush()

    assert await flusher.flush() == 2
    assert (await ledger.sums(UsageQuery()))[0].attempts == 2


async def test_kill_anything(
    database_url: str, own_redis: RedisServer, database: Database, ledger: UsageLedger
) -> None:
    """kill -9 of flushers in mid-flush and of Redis, again and again, while entries arrive: every attempt is in the
    ledger exactly once, and the totals are those of the settlements."""
    redis = connect(own_redis.url)
    await prepare(redis)
    quotas, flusher = Quotas(redis), UsageFlusher(redis, ledger)
    rounds, each = 4, 150
    for number in range(rounds):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FLUSH_FOREVER, own_redis.url, database_url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        who = replace(principal({}), generation=redis.generation)
        for i in range(each):
            hold = await quotas.hold(who, attempt(f"{number}-{i}", 2), 10)
            if i == each // 2:
                process.kill()
            await quotas.settle(hold, msgspec.structs.replace(hold.record, status="ok", completion_tokens=i))
        own_redis.kill()
        own_redis.start()
        await quotas.retry()  # what Redis had not yet written to its file
        await process.communicate()

    await asyncio.gather(flusher.flush(), flusher.flush())
    [total] = await ledger.sums(UsageQuery())

    assert total.attempts == rounds * each
    assert total.prompt_tokens == rounds * each * 2
    assert total.completion_tokens == rounds * sum(range(each))
    await redis.aclose()


async def test_parallel_flushers_do_not_deadlock(database_url: str, ledger: UsageLedger) -> None:
    """DB-09: writers that bring the same attempts in other orders at the same time lose nothing and block nobody."""
    others = [UsageLedger(Database(database_url)) for _ in range(4)]
    records = [done(f"a{i:03}") for i in range(200)]

    for _ in range(5):
        orders = (records, records[::-1], records[100:] + records[:100], records[::3])
        await asyncio.gather(*(other.add(order) for other, order in zip(others, orders, strict=True)))

    assert (await ledger.sums(UsageQuery()))[0].attempts == 200
    for other in others:
        await other._database.close()


async def test_unreadable_entry_is_set_aside(redis: Client, flusher: UsageFlusher, ledger: UsageLedger) -> None:
    """Damage does not stop the flusher, and is kept for a person."""
    await use(redis, "acme", [done("a")])
    await redis.xadd(TenantSlot("acme").usage, {"entry": '{"attempt_id": 1}'})
    await use(redis, "acme", [done("b")])

    await flusher.flush()

    assert (await ledger.sums(UsageQuery()))[0].attempts == 2
    assert await redis.llen(TenantSlot("acme").damaged_usage) == 1


async def test_sums_by_group_and_time(ledger: UsageLedger) -> None:
    """Sums per day, key and model; the end of a span is outside it; no entries are a sum of zero."""
    await ledger.add(
        [
            done("a", created_at=DAY, model="m"), done("b", created_at=DAY + timedelta(minutes=1), model="n"),
            done("c", created_at=DAY + timedelta(minutes=1), model="n", tenant_id="other"),
        ]
    )  # fmt: skip

    by_day = await ledger.sums(UsageQuery("acme"), ["day", "model"])
    span = UsageQuery("acme", start=DAY, end=DAY + timedelta(minutes=1))

    assert [(total.group, total.attempts) for total in by_day] == [
        ({"day": "2026-03-01", "model": "m"}, 1), ({"day": "2026-03-02", "model": "n"}, 1)
    ]  # fmt: skip
    assert [total.attempts for total in await ledger.sums(span)] == [1]
    [nothing] = await ledger.sums(UsageQuery("nobody"))
    assert (nothing.attempts, nothing.completion_tokens) == (0, 0)


async def test_pages_newest_first(ledger: UsageLedger) -> None:
    """Pages go back in time without gaps or repeats, entries of the same moment included."""
    await ledger.add([done(f"a{i}", created_at=DAY + timedelta(seconds=i // 3)) for i in range(10)])

    seen: list[str] = []
    before = None
    while True:
        rows, has_more = await ledger.page(UsageQuery("acme"), before, limit=4)
        seen += [row.attempt_id for row in rows]
        if not has_more:
            break
        before = (rows[-1].created_at, rows[-1].attempt_id)

    assert seen == [f"a{i}" for i in range(9, -1, -1)]


async def test_upkeep_does_it_all(database: Database, redis: Client, ledger: UsageLedger) -> None:
    """Beside the requests: leases live on, usage reaches SQL, a dead worker's lease is settled; leaving writes the
    rest."""
    await prepare(redis)
    quotas, dead = Quotas(redis, lease_s=0.4), Quotas(redis, lease_s=0.4)
    running = await quotas.hold(principal({}), attempt("running"), 9)
    await dead.hold(principal({}), attempt("dead", 5), 9)

    async with Upkeep(redis, quotas, ledger, Epochs(database, redis)):
        async with asyncio.timeout(15):
            while await ledger.get("dead") is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await redis.zrange(TenantSlot("acme").leases, 0, -1) == ["running"]
        await quotas.settle(running, msgspec.structs.replace(running.record, status="ok", completion_tokens=2))

    rows = {name: await ledger.get(name) for name in ("dead", "running")}
    assert [(row.status, row.prompt_tokens, row.completion_tokens) for row in rows.values() if row] == [
        ("expired", 5, 0), ("ok", 1, 2)
    ]  # fmt: skip


async def test_sums_per_day_are_those_of_the_entries(ledger: UsageLedger) -> None:
    """Whatever comes twice, late, or in place of what an expired lease left: sums per day equal sums over entries."""
    records = [
        done(f"a{number}", tenant_id=f"t{number % 3}", model=f"m{number % 2}", created_at=DAY + timedelta(hours=number))
        for number in range(40)
    ]
    expired = [msgspec.structs.replace(record, status="expired", completion_tokens=1) for record in records[::4]]
    await asyncio.gather(
        ledger.add(records[:25]), ledger.add(expired), ledger.add(records[10:]), ledger.add([*expired, *records])
    )
    await ledger.correct("a7", Tokens(completion=-4), "why not", ADMIN)

    for groups in ((), ("day",), ("tenant", "model"), ("day", "key", "status"), ("adapter",)):
        quick = await ledger.sums(UsageQuery(), groups)
        slow = await ledger.sums(UsageQuery(start=DAY - timedelta(days=1)), groups)
        assert [found for found in quick if found.attempts or found.completion_tokens] == slow
    (total,) = await ledger.sums(UsageQuery())
    assert (total.attempts, total.prompt_tokens, total.completion_tokens) == (40, 120, 156)
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    (day,) = await ledger.sums(UsageQuery(start=midnight, end=midnight + timedelta(days=1)))
    assert day.attempts == 24
