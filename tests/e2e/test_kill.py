"""kill -9 of a worker, of the engine and of Redis while streams run: what is cut says so, nothing is lost or counted
twice, nothing stays locked, and everything is there afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.callers import Heard, Oracle, caller, hear, say, until, upload
from tests.e2e.conftest import needs_redis
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter

LEASE_S = 20.0
BASE = "tiny-llama"
STREAMS = "streams"
"""The `user` of what start_streams sends."""
PROMPTS = [[10 * i + j for j in range(8)] for i in range(1, 9)]


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[ChorusProcess]:
    needs_redis()
    with ChorusProcess("serve", str(tiny_llama), "--workers", "2", "--dtype", "float32", data_dir=tmp_path) as made:
        yield made.wait_ready()


@pytest.fixture
def voice(tiny_llama: Path, tmp_path: Path) -> Path:
    return tiny_adapter(tmp_path / "voice", tiny_llama, seed=95)


def ledger(server: ChorusProcess, user: str) -> list[tuple[str, int]]:
    """(status, completion tokens) of every attempt for this `user`; the attempt's id is the primary key."""
    with sqlite3.connect(f"file:{server.data_dir}/chorus.db?mode=ro", uri=True) as database:
        found = database.execute("SELECT status, completion_tokens FROM usage_entries WHERE user = ?", [user])
        return list(found)


def streamed(server: ChorusProcess) -> list[int]:
    """Completion tokens in the ledger of every attempt of start_streams."""
    return [tokens for _, tokens in ledger(server, STREAMS)]


async def start_streams(client: openai.AsyncOpenAI, model: str, num_tokens: int) -> tuple[list[Heard], Any]:
    """8 streams, each of which has begun."""
    streams = [Heard() for _ in PROMPTS]
    tasks = [
        asyncio.create_task(hear(client, model, prompt, num_tokens, heard, user=STREAMS))
        for prompt, heard in zip(PROMPTS, streams, strict=True)
    ]
    await asyncio.gather(*(heard.has(3) for heard in streams))
    return streams, asyncio.gather(*tasks)


async def prepare(server: ChorusProcess, voice: Path) -> tuple[str, str, str]:
    """A tenant for 8 requests at a time, with an adapter, a conversation and a response. → (key, their ids)."""
    key = await asyncio.to_thread(server.make_key, "acme")
    await upload(server, "acme", "voice", voice)
    await asyncio.to_thread(server.admin, "PATCH", "tenants/acme", json={"limits": {"concurrency": 8}})
    async with caller(server, key) as client:
        talk = await client.conversations.create(items=[{"role": "user", "content": "remember me"}])
        made = await client.responses.create(model="voice", input="hi", conversation=talk.id, max_output_tokens=16)
    return key, talk.id, made.id


async def check_all_there(server: ChorusProcess, key: str, talk: str, response: str, text: str) -> None:
    """Tenant, key, adapter, conversation and response are there; 8 requests at a time are let in again."""
    async with caller(server, key, max_retries=20) as client:
        assert (await say(client, "voice", PROMPTS[0], 8)).choices[0].text == text
        items = (await client.conversations.items.list(talk, order="asc")).data
        assert [item.role for item in items] == ["user", "user", "assistant"]  # type: ignore[union-attr]
        assert (await client.responses.retrieve(response)).id == response
    found = await asyncio.to_thread(server.admin, "GET", "tenants/acme/adapters/voice")
    assert found.json()["status"] == "ready"


async def check_limits_free(server: ChorusProcess, key: str, timeout_s: float) -> None:
    """Exactly the limit of 8 at a time is let in, at the latest after a lease."""

    async def all_let_in() -> bool:
        async with caller(server, key) as client:
            answers = await asyncio.gather(
                *(say(client, BASE, prompt, 4) for prompt in PROMPTS), return_exceptions=True
            )
        return not [answer for answer in answers if isinstance(answer, BaseException)]

    async with asyncio.timeout(timeout_s):
        while not await all_let_in():  # noqa: ASYNC110 — other processes tell nobody
            await asyncio.sleep(0.5)


@pytest.mark.timeout(240)
async def test_kill_9_of_the_engine(server: ChorusProcess, voice: Path, oracle: Oracle) -> None:
    """Streams end with the SSE error event (openai: APIError), nothing after it; those that had finished are in the
    ledger once, the cut ones once with what they had got; a new engine serves; no limit stays taken."""
    key, talk, response = await prepare(server, voice)
    async with caller(server, key) as client:
        for prompt in PROMPTS[:3]:
            await say(client, "voice", prompt, 8, user="before")
        streams, ended = await start_streams(client, "voice", 2000)
        (engine,) = server.pids("engine")
        os.kill(engine, signal.SIGKILL)
        await ended
    for heard in streams:
        assert isinstance(heard.error, openai.APIError)
        assert not isinstance(heard.error, openai.APIConnectionError), "the connection just broke"
        assert heard.finish is None

    await asyncio.to_thread(server.wait_line, "engine ended .SIGKILL.; starting it again")
    await check_all_there(server, key, talk, response, oracle(PROMPTS[0], 8, voice))
    await check_limits_free(server, key, 10)
    await until(lambda: len(streamed(server)) >= 8)
    assert ledger(server, "before") == [("ok", 8)] * 3
    assert [status for status, _ in ledger(server, STREAMS)] == ["error"] * 8
    assert min(streamed(server)) >= 3


@pytest.mark.timeout(240)
async def test_the_error_event_as_it_is_on_the_wire(server: ChorusProcess) -> None:
    """wire.md 2.5: after the engine's death the stream's last event is data: {"error": {message, type, param, code}},
    with status 200 as it was, and no finish_reason before it."""
    key = await asyncio.to_thread(server.make_key, "acme")
    events: list[str] = []
    body = {"model": BASE, "prompt": PROMPTS[0], "max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 3:
                    os.kill(server.pids("engine")[0], signal.SIGKILL)

    events = [event for event in events if event != "[DONE]"]
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])


@pytest.mark.timeout(240)
async def test_kill_9_of_a_worker(server: ChorusProcess, voice: Path, oracle: Oracle) -> None:
    """One of two workers: its streams break, those of the other one end whole; the engine lets go of what nobody reads;
    every attempt is in the ledger exactly once, and its leases end."""
    key, talk, response = await prepare(server, voice)
    async with caller(server, key) as client:
        streams, ended = await start_streams(client, "voice", 1000)
        first, second = server.pids("worker")
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(0.3)
        if not any(heard.error for heard in streams):  # all had gone to the other one
            os.kill(second, signal.SIGKILL)
        await ended
    assert any(heard.error for heard in streams)
    whole = [heard for heard in streams if heard.error is None]
    assert {heard.text for heard in whole} <= set(oracle.all(PROMPTS, 1000, [voice] * 8))
    for heard in streams:
        assert (heard.error is None) == (heard.finish == "length")

    await check_all_there(server, key, talk, response, oracle(PROMPTS[0], 8, voice))
    await check_limits_free(server, key, LEASE_S + 20)
    await until(lambda: len(streamed(server)) >= 8, timeout_s=LEASE_S + 20)
    assert len(streamed(server)) == 8
    assert streamed(server).count(1000) >= len(whole)


@pytest.mark.timeout(240)
async def test_kill_9_of_redis(server: ChorusProcess, voice: Path, oracle: Oracle) -> None:
    """Streams that run go on and end whole; what they used is settled when Redis is back, once; while it is away
    callers get 503, not 401; then all is there."""
    key, talk, response = await prepare(server, voice)
    await asyncio.sleep(1.2)  # an append-only file is written every second
    async with caller(server, key) as client:
        streams, ended = await start_streams(client, "voice", 1000)
        (redis,) = server.pids("redis")
        os.kill(redis, signal.SIGKILL)
        (answer,) = await asyncio.gather(say(client, BASE, PROMPTS[0], 1), return_exceptions=True)
        if isinstance(answer, openai.APIStatusError):  # or it came after the restart
            assert answer.status_code in (503, 429)  # 429: it is back already, and knows the eight
            assert int(answer.response.headers["retry-after"]) >= 1
        await ended
    assert [heard.error for heard in streams] == [None] * 8
    assert [heard.text for heard in streams] == oracle.all(PROMPTS, 1000, [voice] * 8)

    await asyncio.to_thread(server.wait_line, "redis ended .SIGKILL.; starting it again")
    await check_all_there(server, key, talk, response, oracle(PROMPTS[0], 8, voice))
    await check_limits_free(server, key, LEASE_S + 20)
    await until(lambda: len(streamed(server)) >= 8, timeout_s=LEASE_S)
    assert streamed(server) == [1000] * 8


@pytest.mark.timeout(240)
async def test_kill_9_of_everything(server: ChorusProcess, voice: Path, oracle: Oracle, tiny_llama: Path) -> None:
    """The parent dies, and all with it, while streams run; the next start has tenants, keys, adapters, conversations,
    a ledger without doubles, and free limits."""
    key, talk, response = await prepare(server, voice)
    await asyncio.sleep(1.2)
    async with caller(server, key) as client:
        streams, ended = await start_streams(client, "voice", 2000)
        server.process.kill()
        await ended
    assert all(heard.error is not None for heard in streams)
    await asyncio.to_thread(server.process.wait)

    arguments = ("serve", str(tiny_llama), "--workers", "2", "--dtype", "float32")
    with ChorusProcess(*arguments, data_dir=server.data_dir) as again:
        await asyncio.to_thread(again.wait_ready)
        await check_all_there(again, key, talk, response, oracle(PROMPTS[0], 8, voice))
        await check_limits_free(again, key, LEASE_S + 20)
        await until(lambda: len(streamed(again)) >= 8, timeout_s=LEASE_S + 20)
        assert len(streamed(again)) == 8
