"""Two workers on the same stores, and stores that go away: nothing lives in one process alone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.gateway.live import Live, serve
from tests.gateway.test_adapters_api import ACME, parts
from tests.services import PostgresServer, RedisServer
from tests.tiny import tiny_adapter


@pytest.fixture
async def pair(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str) -> AsyncIterator[tuple[Live, Live]]:
    """Two gateways on one database, one Redis, one store of adapters."""
    async with (
        serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as one,
        serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as two,
    ):
        yield one, two


async def test_an_adapter_is_known_to_every_worker(pair: tuple[Live, Live], tiny_lora: Path) -> None:
    """HS-13: after 201 every worker lists and serves it, after a swap every worker serves version 2, after deletion
    none does: at the next request, without waiting."""
    one, two = pair
    files = tuple((tiny_lora / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    key = await one.key("acme")
    callers = [await live.openai(key) for live in pair]
    admin = await one.http()

    for i in range(3):
        for caller in callers:  # both have answered for this tenant before: what they know is out of date
            assert [model.id for model in (await caller.models.list()).data] == ["tiny"]
            with pytest.raises(openai.NotFoundError):
                await caller.responses.create(model="pirate", input="hi")
        assert (await admin.post(ACME, files=parts(files, "pirate"))).status_code == 201  # type: ignore[arg-type]
        for live, caller in zip(pair, callers, strict=True):
            assert [model.id for model in (await caller.models.list()).data] == ["tiny", "pirate"]
            await caller.responses.create(model="pirate", input="hi")
            assert live.engine.requests[-1].adapter is not None
        swapped = (await admin.put(f"{ACME}/pirate", files=parts(files))).json()  # type: ignore[arg-type]
        raw = await two.http(key)
        answer = await raw.post("/v1/responses", json={"model": "pirate", "input": "hi"})
        assert answer.headers["x-adapter-version"] == str(swapped["version"]) == str(2 * i + 2)
        await admin.delete(f"{ACME}/pirate")


async def test_turns_on_two_workers(pair: tuple[Live, Live]) -> None:
    """DB-01: 10 parallel turns on one conversation over two workers, tried again by the SDK: all are there in the
    end, alternating, none lost or mixed; and a chain may go from worker to worker."""
    key = await pair[0].key("acme")
    for live in pair:
        live.engine._delay_s = 0.002
    patient = [await live.openai(key, max_retries=30) for live in pair]
    talk = await patient[0].conversations.create()

    await asyncio.gather(
        *(patient[i % 2].responses.create(model="tiny", input=f"q{i}", conversation=talk.id) for i in range(6))
    )

    items = (await patient[1].conversations.items.list(talk.id, limit=100, order="asc")).data
    questions = [item.content[0].text for item in items[::2]]  # type: ignore[union-attr]
    assert sorted(questions) == [f"q{i}" for i in range(6)]
    assert [item.role for item in items] == ["user", "assistant"] * 6  # type: ignore[union-attr]
    previous = None
    for i in range(4):
        made = await patient[i % 2].responses.create(model="tiny", input=str(i), previous_response_id=previous)
        previous = made.id
    assert pair[1].prompts()[-1].count("assistant") == 4


async def test_redis_away(tiny_llama: Path, tmp_path: Path, sqlite_url: str, own_redis: RedisServer) -> None:
    """DB-02, T4: while Redis hangs or is dead, what needs it is 503 with Retry-After within a second or two, never
    401; the stream that runs is stored when Redis is back; then all is as it was."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, own_redis.url) as live:
        caller = await live.openai(await live.key("acme"))
        talk = await caller.conversations.create()
        first = await caller.responses.create(model="tiny", input="1", conversation=talk.id)
        live.engine._delay_s = 0.02
        live.answers = ["word " * 30]
        stream = await caller.responses.create(model="tiny", input="2", conversation=talk.id, stream=True)
        await anext(aiter(stream))

        own_redis.signal(signal.SIGSTOP)
        for call in (
            lambda: caller.responses.retrieve(first.id),
            lambda: caller.conversations.retrieve(talk.id),
            lambda: caller.responses.create(model="tiny", input="x", previous_response_id=first.id),
        ):
            started = time.monotonic()
            with pytest.raises(openai.InternalServerError) as caught:
                await call()
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert time.monotonic() - started < 5
        own_redis.signal(signal.SIGCONT)

        assert [event async for event in stream][-1].type == "response.completed"
        assert (await caller.responses.retrieve(first.id)).id == first.id
        assert len((await caller.conversations.items.list(talk.id)).data) == 4


async def test_kill_9_of_redis_loses_no_stored_turn(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, own_redis: RedisServer
) -> None:
    """After kill -9 and restart of Redis (append-only file) conversations and responses are there; a stream that was
    running is stored when it ends."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, own_redis.url) as live:
        caller = await live.openai(await live.key("acme"))
        talk = await caller.conversations.create()
        first = await caller.responses.create(model="tiny", input="1", conversation=talk.id)
        live.engine._delay_s = 0.02
        live.answers = ["word " * 40]
        stream = await caller.responses.create(model="tiny", input="2", conversation=talk.id, stream=True)
        await anext(aiter(stream))
        await asyncio.sleep(1.1)  # appendfsync everysec
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)

        last = [event async for event in stream][-1]

        assert last.type == "response.completed"
        for made in (first, last.response):
            assert (await caller.responses.retrieve(made.id)).id == made.id
        assert len((await caller.conversations.items.list(talk.id)).data) == 4


async def test_conversations_end_with_their_time_to_live(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str
) -> None:
    """What nobody uses for conversation_ttl_s is gone; what is used stays."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, conversation_ttl_s=3) as live:
        caller = await live.openai(await live.key("acme"))
        used, unused = [await caller.conversations.create() for _ in range(2)]
        for _ in range(8):
            await asyncio.sleep(0.5)
            await caller.conversations.items.list(used.id)

        assert (await caller.conversations.retrieve(used.id)).id == used.id
        with pytest.raises(openai.NotFoundError):
            await caller.conversations.retrieve(unused.id)


async def test_an_upload_needs_no_engine(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    """Uploads and hot swaps work while no engine answers: the shape of the base is known from its config."""
    directory = tiny_adapter(tmp_path / "a", tiny_llama, rank=3)
    files = tuple((directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as live:
        live.engine.ready = None
        await live.key("acme")
        admin = await live.http()

        made = await admin.post(ACME, files=parts(files, "pirate"))  # type: ignore[arg-type]
        assert (made.status_code, made.json()["rank"]) == (201, 3)
        assert (await admin.delete(f"{ACME}/pirate")).status_code == 200
        caller = await live.http(await live.key("acme"))
        answer = await caller.post("/v1/responses", json={"model": "tiny", "input": "hi"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_names_are_won_once_on_postgresql(
    tiny_llama: Path, tmp_path: Path, postgres_server: PostgresServer, migrated_postgres: str, redis_url: str
) -> None:
    """HS-05, HS-14 on the other database: of parallel uploads and tenants of one name exactly one is 201; versions that
    are made at once get different numbers."""
    directory = tiny_adapter(tmp_path / "a", tiny_llama, rank=3, targets=("q_proj",))
    files = tuple((directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    url = postgres_server.emptied(migrated_postgres)
    async with serve(tiny_llama, tmp_path / "data", url, redis_url) as live:
        admin = await live.http()
        made = await asyncio.gather(*(admin.post("/admin/v1/tenants", json={"id": "acme"}) for _ in range(5)))
        assert sorted(answer.status_code for answer in made) == [201, 409, 409, 409, 409]

        made = await asyncio.gather(
            *(admin.post(ACME, files=parts(files, "pirate")) for _ in range(4))  # type: ignore[arg-type]
        )
        assert sorted(answer.status_code for answer in made) == [201, 409, 409, 409]
        made = await asyncio.gather(
            *(admin.put(f"{ACME}/pirate", files=parts(files)) for _ in range(4))  # type: ignore[arg-type]
        )
        assert sorted(answer.json()["version"] for answer in made) == [2, 3, 4, 5]
        assert (await admin.get(f"{ACME}/pirate")).json()["current_version"] in (2, 3, 4, 5)
        for odd in ("%00", "a%0ab", "é"):
            assert (await admin.get(f"{ACME}/{odd}")).status_code == 404
            assert (await admin.get(f"/admin/v1/tenants/{odd}")).status_code == 404
        assert (await admin.delete("/admin/v1/tenants/acme")).status_code == 200
