"""Limits on the wire: headers, 429s that a client can act on; and the answers when Redis, SQL or the engine is away."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import migrations
from engine.protocol import Broken, EngineError, Refused, Unavailable
from tenants.quotas import Hold, Quotas
from tenants.usage import UsageRecord
from tests.gateway.live import Live, serve
from tests.gateway.scripted import Script, chat, error_of
from tests.services import PostgresServer, RedisServer

PATH = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")
WINDOWS = ("requests", "tokens")


async def limited(live: Live, tenant: str, **limits: int) -> httpx.AsyncClient:
    key = await live.key(tenant)
    answer = await (await live.http()).patch(f"/admin/v1/tenants/{tenant}", json={"limits": limits})
    assert answer.status_code == 200, answer.text
    return await live.http(key)


def remaining(answer: httpx.Response, window: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{window}"])


GO_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)(ms|s))?")
BODIES: dict[str, dict[str, Any]] = {
    PATH: chat(max_tokens=50),
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 50},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 50},
}


def check_windows(answer: httpx.Response, limits: dict[str, int]) -> None:
    """The six headers: integers, and a duration as Go prints it, until the bucket is full again."""
    for window in WINDOWS:
        limit, reset = answer.headers[f"x-ratelimit-limit-{window}"], answer.headers[f"x-ratelimit-reset-{window}"]
        assert limit == str(limits[f"{window}_per_minute"])
        found = GO_DURATION.fullmatch(reset)
        assert found is not None, reset
        assert reset
        hours, minutes, rest, unit = found.groups()
        seconds = int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(rest or 0) / (1000 if unit == "ms" else 1)
        per_token = 60 / int(limit)
        missing = int(limit) - remaining(answer, window)
        assert (missing - 1) * per_token <= seconds <= missing * per_token + 0.002, (window, reset)


async def test_six_headers(server: Live) -> None:
    """T31: limit and remaining are integers, reset the time until the bucket is full, as a Go duration; on plain
    answers, on streams and on 429, of every endpoint; what is unlimited has none."""
    limits = {"requests_per_minute": 6, "tokens_per_minute": 60_000}
    client = await limited(server, "six-headers", **limits)
    free = await server.http(await server.key("free"))

    for number, (path, body) in enumerate([*BODIES.items()] * 2):
        answer = await client.post(path, json=body | {"stream": number >= 3})
        assert answer.status_code == 200, answer.text
        check_windows(answer, limits)
        assert 5 - number <= remaining(answer, "requests") <= 5
        assert remaining(answer, "tokens") <= 60_000 - 50
        unlimited = await free.post(path, json=body | {"stream": number >= 3})
        assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
    for path, body in BODIES.items():
        answer = await client.post(path, json=body | {"stream": True})
        while answer.status_code == 200:  # on a slow machine a request flowed back
            answer = await client.post(path, json=body | {"stream": True})
        assert (answer.status_code, remaining(answer, "requests")) == (429, 0)
        check_windows(answer, limits)


async def test_nothing_is_charged_for_what_is_refused(server: Live) -> None:
    """T6, T30, HS-03: bad bodies, unknown models, prompts that don't fit consume neither requests nor tokens, on any
    endpoint, streamed or not; nor does what a limit refuses, however often."""
    client = await limited(server, "nothing-is-charged-f", requests_per_minute=1, tokens_per_minute=100_000)

    for path, body in BODIES.items():
        (text,) = {"messages", "prompt", "input"} & body.keys()
        limit = "max_output_tokens" if text == "input" else "max_tokens"
        for wrong in (
            {"temperature": 9}, {"model": "nope"}, {text: [{"role": "user", "content": "x" * 5000}]}, {limit: 512},
            {"logit_bias": {"9999": 1}}, {text: None}, {"previous_response_id": "resp_x"}, {"zzz": 1},
        ):  # fmt: skip
            for stream in (False, True):
                answer = await client.post(path, json=body | wrong | {"stream": stream})
                assert answer.status_code in (400, 404), (path, wrong, answer.text)
    answer = await client.post(PATH, json=chat(max_tokens=5))

    assert answer.status_code == 200
    assert remaining(answer, "requests") == 0
    assert remaining(answer, "tokens") > 99_000
    for _ in range(20):
        refused = await client.post(PATH, json=chat(max_tokens=400))
        assert refused.status_code == 429
    assert remaining(refused, "tokens") > 99_000


async def test_too_many_requests(server: Live) -> None:
    """T2, T26, QB-12: 429 says which limit, Limit/Used/Requested and when to come again; the SDK raises
    RateLimitError with the code."""
    client = await limited(server, "too-many-requests", requests_per_minute=2)
    for _ in range(2):
        assert (await client.post(PATH, json=chat())).status_code == 200

    answer = await client.post(PATH, json=chat())

    assert answer.status_code == 429
    error = error_of(answer)
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert re.search(r"Limit 2, Used 2, Requested 1", error["message"]), error["message"]
    assert re.fullmatch(r"[1-9]\d*", answer.headers["retry-after"])
    assert int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    sdk = await server.openai(await server.key("too-many-requests"))
    with pytest.raises(openai.RateLimitError) as caught:
        await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "rate_limit_exceeded"


async def test_a_request_above_the_window(server: Live) -> None:
    """A single request that is larger than the whole window can never pass: no Retry-After, x-should-retry false."""
    client = await limited(server, "a-request-above-the-", tokens_per_minute=100)

    answer = await client.post(PATH, json=chat(max_tokens=200))

    assert answer.status_code == 429
    assert error_of(answer)["type"] == "tokens"
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert not server.engine.requests


async def test_unused_tokens_come_back(server: Live) -> None:
    """What was reserved and not used is there for the next request, at once, and the next one sees it."""
    client = await limited(server, "unused-tokens-come-b", tokens_per_minute=100_000)

    first = await client.post(PATH, json=chat(max_tokens=400))
    second = await client.post(PATH, json=chat(max_tokens=400))

    used = first.json()["usage"]["total_tokens"]
    assert abs((remaining(first, "tokens") - remaining(second, "tokens")) - used) <= 60


async def test_concurrency_is_free_when_the_answer_ends(server: Live) -> None:
    """T49, QB-09: with one place a second call is 429 while the first streams; who has seen [DONE] has a free place."""
    gate = asyncio.Event()
    script = Script(gate=gate).install(server)
    client = await limited(server, "concurrency-is-free-", concurrency=1)

    running = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
    await script.started.wait()
    await asyncio.sleep(0.05)
    refused = await client.post(PATH, json=chat())
    gate.set()
    first = await running

    assert refused.status_code == 429
    assert error_of(refused)["code"] == "rate_limit_exceeded"
    assert first.text.endswith("data: [DONE]\n\n")
    for stream in (True, False, True, False):
        assert (await client.post(PATH, json=chat(stream=stream))).status_code == 200


def settle_late(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], Awaitable[object]]) -> set[asyncio.Future[None]]:
    """Settlements begin with a wait. → those under way."""
    settling, under_way = Quotas.settling, set[asyncio.Future[None]]()

    def late(quotas: Quotas, hold: Hold, record: UsageRecord) -> asyncio.Future[None]:
        async def settle() -> None:
            await wait()
            await settling(quotas, hold, record)

        task = asyncio.ensure_future(settle())
        under_way.add(task)
        return task

    monkeypatch.setattr(Quotas, "settling", late)
    return under_way


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limits", [{}, {"concurrency": 2, "tokens_per_minute": 100_000}])
async def test_who_has_room_does_not_wait_for_the_settlement(
    server: Live, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], stream: bool
) -> None:
    """While at most half of every limit is taken, the end is told when the settlement is on its way; it comes."""
    tenant = f"room-{len(limits)}-{stream}".lower()
    client = await limited(server, tenant, **limits)
    gate = asyncio.Event()
    under_way = settle_late(monkeypatch, gate.wait)

    async with asyncio.timeout(30):
        answer = await client.post(PATH, json=chat(stream=stream))

    assert answer.status_code == 200
    assert await server.num_leases(tenant) == 1
    gate.set()
    await asyncio.gather(*under_way)
    assert len(under_way) == 1
    assert await server.num_leases(tenant) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_who_has_seen_the_end_has_a_free_place(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """T49: the end of an answer is told when its place has been given back, however long that takes: whichever worker
    the client asks next lets it in."""
    tenant = f"end-{len(path)}-{stream}".lower()
    client = await limited(server, tenant, concurrency=1)
    under_way = settle_late(monkeypatch, lambda: asyncio.sleep(0.1))

    async with client.stream("POST", path, json=BODIES[path] | {"stream": stream}) as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_text():
            if not stream or "[DONE]" in piece or "response.completed" in piece:
                assert await server.num_leases(tenant) == 0
                break
        else:
            pytest.fail("the end never came")
    await asyncio.gather(*under_way)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Refused("queue_full", "too many wait", 3.0), 503, "server_is_overloaded"),
        (Refused("lane_full", "too many of yours wait", 2.0), 429, "rate_limit_exceeded"),
        (Refused("adapter_loading", "not loaded in time", 5.0), 503, "model_loading"),
        (Refused("draining", "about to stop", 1.0), 503, "service_unavailable"),
        (Refused("deadline", "too late"), 504, "timeout"),
        (Refused("prompt_too_long", "never fits", None, None), 400, "context_length_exceeded"),
        (Refused("engine_error", "ours"), 500, None),
        (Unavailable("engine_error", "nobody there", 2.0), 503, "service_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_engine(
    server: Live, error: EngineError, status: int, code: str | None, stream: bool
) -> None:
    """T21: what the engine refuses is an HTTP status, in streams too, on every endpoint; place and tokens are given
    back, and nothing is billed."""
    script = Script(error=error).install(server)
    client = await limited(
        server,
        f"{error.code}-{type(error).__name__}-{stream}".replace("_", "-"),
        concurrency=1,
        tokens_per_minute=100_000,
    )

    for path, body in BODIES.items():
        answer = await client.post(path, json=body | {"stream": stream})
        assert answer.status_code == status
        assert error_of(answer)["code"] == code
        if status in (429, 503):
            assert int(answer.headers["retry-after"]) >= 1
        if status == 429:
            assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
            assert remaining(answer, "tokens") == 100_000, "its own tokens are given back"
    script.error = None
    good = await client.post(PATH, json=chat(max_tokens=5))
    assert remaining(good, "tokens") > 99_000
    admin, rows = await server.http(), list[dict[str, Any]]()
    for _ in range(200):
        tenant = good.headers["openai-organization"]
        rows = (await admin.get(f"/admin/v1/usage/entries?tenant={tenant}")).json()["data"]
        if len(rows) == 4:
            break
        await asyncio.sleep(0.02)
    billed = [row["prompt_tokens"] + row["completion_tokens"] for row in rows]
    assert billed == [good.json()["usage"]["total_tokens"], 0, 0, 0]


async def test_usage_is_written(server: Live) -> None:
    """ST-07, QB-05: the ledger has one row per attempt: plain, stream without usage, refused, broken; its numbers are
    those of the answers."""
    script = Script(["a b c d"]).install(server)
    client = await server.http(await server.key("usage-is-written"))
    plain = (await client.post(PATH, json=chat(user="ann", metadata={"team": "x"}))).json()["usage"]
    await client.post(PATH, json=chat(stream=True, n=2))
    script.fail_after, script.error = 2, Broken("engine_error", "died")
    await client.post(PATH, json=chat(stream=True))

    admin = await server.http()
    for _ in range(100):
        rows = (await admin.get("/admin/v1/usage?tenant=usage-is-written")).json()
        if _total(rows, "num_requests") == 3:
            break
        await asyncio.sleep(0.05)

    completion = plain["completion_tokens"]
    assert _total(rows, "prompt_tokens") == 3 * plain["prompt_tokens"]
    assert _total(rows, "completion_tokens") == completion + 2 * completion + 2


def _rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(body.get("data", []))


def _total(body: dict[str, Any], name: str) -> int:
    return sum(int(row.get(name) or 0) for row in _rows(body))


async def test_without_redis(tiny_llama: Path, tmp_path: Path, sqlite_url: str, own_redis: RedisServer) -> None:
    """T4, DB-02: Redis hung or dead: a valid key gets 503 with Retry-After within about a second, never 401; liveness
    and the model list's refusal are quick; a running stream ends well; all is normal when Redis is back."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, own_redis.url) as live:
        key = await live.key("acme")
        client = await live.http(key)
        assert (await client.post(PATH, json=chat())).status_code == 200
        gate = asyncio.Event()
        script = Script(["a b c"], gate=gate).install(live)
        stream = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
        await script.started.wait()
        await asyncio.sleep(0.05)
        for stop in (lambda: own_redis.signal(signal.SIGSTOP), own_redis.kill):
            stop()
            started = time.monotonic()
            answers = await asyncio.gather(
                client.post(PATH, json=chat()), client.post(PATH, json=chat(stream=True)), client.get("/v1/models")
            )
            assert time.monotonic() - started < 3
            for answer in answers:
                assert answer.status_code == 503, answer.text
                assert int(answer.headers["retry-after"]) >= 1
                assert error_of(answer)["type"] == "server_error"
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/readyz")).json()["redis"] == "away"
            scrape = await (await live.http()).get("/metrics")
            assert "chorus_redis_up 0.0" in scrape.text
        gate.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        own_redis.start()
        assert (await client.post(PATH, json=chat())).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_without_a_database(
    tiny_llama: Path, tmp_path: Path, own_postgres: PostgresServer, redis_url: str
) -> None:
    """T4: when SQL hangs or is dead, a known key goes on, one that would have to be looked up is 503, never 401; when
    it is back, all is well."""
    url = own_postgres.create()
    await asyncio.to_thread(migrations.upgrade, url)
    async with serve(tiny_llama, tmp_path / "data", url, redis_url) as live:
        client = await live.http(await live.key("acme"))
        cold = await live.http(await live.key("bolt"))
        assert (await client.post(PATH, json=chat())).status_code == 200
        for stop in (lambda: own_postgres.signal(signal.SIGSTOP), own_postgres.kill):
            stop()
            started = time.monotonic()
            known, unknown, ready = await asyncio.gather(
                client.post(PATH, json=chat()), cold.post(PATH, json=chat()), client.get("/readyz")
            )
            assert time.monotonic() - started < 4
            assert known.status_code == 200
            assert unknown.status_code == 503
            assert int(unknown.headers["retry-after"]) >= 1
            assert (ready.status_code, ready.json()["database"]) == (503, "away")
        own_postgres.start()
        assert (await cold.post(PATH, json=chat())).status_code == 200
