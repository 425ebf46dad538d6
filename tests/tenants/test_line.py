"""The line that all requests share: answers go to those who asked, breaks are repaired, silences are told."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from redis.exceptions import NoScriptError, ResponseError

from tenants.state import ANSWER_S, Client, RedisUnavailable, connect
from tests.services import RedisServer


async def test_answers_reach_those_who_asked(redis: Client) -> None:
    """Hundreds at once, values and errors mixed, some callers gone before the answer: nobody gets another's."""
    commands = [redis.send("ECHO", f"{i}") if i % 3 else redis.send("EVALSHA", "0" * 40, 0) for i in range(300)]
    for i in range(0, 300, 7):
        commands[i].cancel()

    answers = await asyncio.gather(*commands, return_exceptions=True)

    for i, answer in enumerate(answers):
        if i % 7 == 0:
            assert isinstance(answer, asyncio.CancelledError)
        elif i % 3 == 0:
            assert isinstance(answer, NoScriptError)
        else:
            assert answer == str(i)


async def test_one_turn_is_one_write(redis: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent in one turn of the event loop travels together."""
    await redis.send("PING")
    wire, writes = redis.line._wire, []
    assert wire is not None
    write = wire.write
    monkeypatch.setattr(wire, "write", lambda data: (writes.append(data), write(data)))

    await asyncio.gather(*(redis.send("ECHO", str(i)) for i in range(50)))

    assert len(writes) == 1


async def test_an_error_is_the_callers_alone(redis: Client) -> None:
    """A command that Redis refuses raises ResponseError; the line goes on."""
    await redis.send("SET", "text", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await redis.send("HGET", "text", "x")
    assert await redis.send("GET", "text") == "x"


async def test_a_broken_connection_is_made_anew(redis: Client) -> None:
    """Killed by the server while commands are on their way: they are sent again, once, and answered."""
    for _ in range(5):
        asked = [redis.send("ECHO", str(i)) for i in range(20)]
        await redis.client_kill_filter(_type="normal", skipme=True)
        assert await asyncio.gather(*asked) == [str(i) for i in range(20)]


async def test_a_redis_that_is_gone(own_redis: RedisServer) -> None:
    """No connection: RedisUnavailable for all who ask; when it is back, the next command finds it."""
    redis = connect(own_redis.url)
    assert await redis.send("PING") == "PONG"
    own_redis.kill()

    answers = await asyncio.gather(*(redis.send("PING") for _ in range(20)), return_exceptions=True)

    assert {type(answer) for answer in answers} == {RedisUnavailable}
    own_redis.start()
    assert await redis.send("PING") == "PONG"
    await redis.aclose()


async def test_a_hung_redis(own_redis: RedisServer) -> None:
    """A silence ends for all who wait, those who came late included, and nothing is sent twice."""
    redis = connect(own_redis.url)
    await redis.send("SET", "count", 0)
    own_redis.signal(signal.SIGSTOP)
    started = time.perf_counter()
    asked = [redis.send("INCR", "count") for _ in range(10)]

    answers = await asyncio.gather(*asked, return_exceptions=True)

    assert {type(answer) for answer in answers} == {RedisUnavailable}
    assert ANSWER_S * 0.8 < time.perf_counter() - started < ANSWER_S + 0.7
    own_redis.signal(signal.SIGCONT)
    assert int(await redis.send("GET", "count")) <= 10
    await redis.aclose()


async def test_a_pause_of_the_loop_is_no_silence(redis: Client) -> None:
    """Our own loop stood still for longer than the limit: the answers, which are there, are read."""
    await redis.send("PING")
    asked = [redis.send("ECHO", str(i)) for i in range(20)]
    await asyncio.sleep(0)

    time.sleep(ANSWER_S + 0.3)  # noqa: ASYNC251 — that is the fault

    assert await asyncio.gather(*asked) == [str(i) for i in range(20)]


async def test_closing_leaves_nobody_waiting(redis_url: str) -> None:
    """Whoever still waits when the line is closed hears so."""
    redis = connect(redis_url)
    await redis.send("PING")
    asked = redis.send("BLPOP", "nothing", 5)
    await asyncio.sleep(0.05)

    await redis.aclose()

    with pytest.raises(RedisUnavailable):
        await asked
