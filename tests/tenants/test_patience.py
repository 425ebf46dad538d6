"""Waiting for a store: what is slow in this process is no outage, and an outage is noticed all the same."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
import warnings

import pytest
from sqlalchemy import text

from tenants.db import Database
from tenants.patience import Deadline, Turns, TurnsStopped
from tenants.state import ANSWER_S, RedisUnavailable, connect
from tests.services import PostgresServer, RedisServer


async def test_a_deadline_ends_what_takes_too_long() -> None:
    """TimeoutError at its time; what is quicker is left alone."""
    started = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with Deadline(0.2):
            await asyncio.sleep(30)
    assert 0.2 <= time.perf_counter() - started < 2

    async with Deadline(5):
        await asyncio.sleep(0)


async def test_a_pause_of_the_loop_is_no_timeout(redis_url: str) -> None:
    """Redis has answered, but our loop was busy for longer than the limit: the answer is read, nobody is given up."""
    redis = connect(redis_url)
    await redis.ping()
    commands = [asyncio.create_task(redis.ping()) for _ in range(20)]
    await asyncio.sleep(0)

    time.sleep(ANSWER_S + 0.3)  # noqa: ASYNC251 — that is the fault

    assert await asyncio.gather(*commands) == [True] * 20
    await redis.aclose()


async def test_more_callers_than_connections(redis_url: str) -> None:
    """A thousand commands at once over two connections, which take seconds: all are answered."""
    redis = connect(redis_url, max_connections=2)
    slow = "local t = redis.call('TIME') local function now() t = redis.call('TIME') return t[1] * 1000000 + t[2] end "
    slow += "local start = now() while now() - start < 1000 do end return 1"

    started = time.perf_counter()
    answers = await asyncio.gather(*(redis.eval(slow, 0) for _ in range(1000)))

    assert answers == [1] * 1000
    assert time.perf_counter() - started > ANSWER_S, "too quick to prove anything"
    await redis.aclose()


async def test_a_hung_redis_is_an_outage_for_all_who_wait(own_redis: RedisServer) -> None:
    """However many wait for a turn, each hears within the bound of one command that Redis is away."""
    redis = connect(own_redis.url, max_connections=2)
    await redis.ping()
    own_redis.signal(signal.SIGSTOP)
    started = time.perf_counter()

    answers = await asyncio.gather(*(redis.ping() for _ in range(100)), return_exceptions=True)

    assert {type(answer) for answer in answers} == {RedisUnavailable}
    assert time.perf_counter() - started < ANSWER_S + 0.7
    own_redis.signal(signal.SIGCONT)
    assert await redis.ping()
    await redis.aclose()


async def test_turns_are_first_come_first_served() -> None:
    """Who waited longest is next; who leaves while waiting takes nobody's turn."""
    turns, order = Turns(1, 10.0), []

    async def work(name: str) -> None:
        await turns.take()
        order.append(name)
        await asyncio.sleep(0)
        turns.give()

    tasks = [asyncio.create_task(work(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert order == ["a", "c", "d"]
    await asyncio.wait_for(work("e"), 1)


async def test_a_turn_that_comes_to_one_who_leaves_goes_on() -> None:
    """Cancelled in the very moment in which the turn came: it is the next one's."""
    turns = Turns(1, 10.0)
    await turns.take()
    leaver, next_one = asyncio.create_task(turns.take()), asyncio.create_task(turns.take())
    await asyncio.sleep(0)

    turns.give()
    leaver.cancel()

    await asyncio.wait_for(next_one, 1)
    with pytest.raises(asyncio.CancelledError):
        await leaver


async def test_turns_that_never_come_back() -> None:
    """Nobody gives one back for the whole patience: the others stop waiting, and later ones get theirs again."""
    turns = Turns(1, 0.1)
    await turns.take()
    with pytest.raises(TurnsStopped):
        await turns.take()
    turns.give()
    await turns.take()


async def test_a_burst_of_writers_is_no_outage(own_postgres: PostgresServer) -> None:
    """40 transactions of 0.1 s at once over two connections take longer than the limit for an answer: all succeed."""
    database = Database(own_postgres.create(), pool_size=2)

    async def write() -> None:
        async with database.begin() as session:
            await session.execute(text("SELECT pg_sleep(0.1)"))

    started = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(40)))

    assert time.perf_counter() - started > ANSWER_S, "too quick to prove anything"
    await database.close()


async def test_a_caller_that_leaves_while_it_connects_leaves_no_connection(sqlite_url: str) -> None:
    """Cancelled at any moment on the way to its connection: it is given back, not left to the garbage collector."""
    database = Database(sqlite_url, pool_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turns in range(1, 30):
            task = asyncio.create_task(database.ping())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not database.engine.pool.checkedout():  # type: ignore[attr-defined]
                break
        gc.collect()

    assert database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await asyncio.gather(*(database.ping() for _ in range(10)))
    await database.close()
