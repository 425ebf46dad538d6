"""/metrics: one sum over all workers, kept in Redis; gauges of the engines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import KEY, Metrics
from gateway.replicas import ReplicaSet
from tenants.state import Client, RedisUnavailable, connect
from tests.fakes import FakeEngine
from tests.gateway.live import ADMIN_KEY, Live
from tests.gateway.scripted import chat
from tests.services import RedisServer

PATH = "/v1/chat/completions"
NOBODY = ReplicaSet([])


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def value(text: bytes, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text.decode(), re.MULTILINE)
    assert found, sample
    return float(found[1])


async def test_metrics(live: Live) -> None:
    """The scrape has requests by route and status, tokens and times, and the engine's gauges; the admin key only."""
    client = await live.http(await live.key("acme"))
    usage = (await client.post(PATH, json=chat())).json()["usage"]
    await client.post(PATH, json=chat(temperature=9))

    answer = await (await live.http(ADMIN_KEY)).get("/metrics")

    assert 'chorus_requests_total{route="/v1/chat/completions",status="200"} 1.0' in answer.text
    assert 'chorus_requests_total{route="/v1/chat/completions",status="400"} 1.0' in answer.text
    assert 'chorus_request_seconds_bucket{le="+Inf",route="/v1/chat/completions"} 2.0' in answer.text
    for kind in ("prompt", "completion"):
        assert f'chorus_tokens_total{{kind="{kind}"}} {float(usage[f"{kind}_tokens"])}' in answer.text
    assert "chorus_first_token_seconds_count 1.0" in answer.text
    assert 'chorus_engine_up{replica="0"} 1.0' in answer.text
    assert (await client.get("/metrics")).status_code == 403


async def test_workers_are_summed(redis: Client) -> None:
    """Two workers count into one sum, which a third one shows; a worker that ends takes nothing with it."""
    for _ in range(2):
        async with Metrics(redis) as worker:
            worker.add("chorus_requests", "/x", "200", value=2)
            worker.observe("chorus_first_token_seconds", seconds=0.3)
            worker.observe("chorus_first_token_seconds", seconds=500)

    text = await Metrics(redis).render(NOBODY)

    assert value(text, 'chorus_requests_total{route="/x",status="200"}') == 4
    assert value(text, 'chorus_first_token_seconds_bucket{le="0.25"}') == 0
    assert value(text, 'chorus_first_token_seconds_bucket{le="0.5"}') == 2
    assert value(text, 'chorus_first_token_seconds_bucket{le="+Inf"}') == 4
    assert value(text, "chorus_first_token_seconds_sum") == pytest.approx(1000.6)
    assert list(text_string_to_metric_families(text.decode()))


async def test_an_outage_loses_no_count(own_redis: RedisServer) -> None:
    """While Redis is away counts are kept, and added once when it is back."""
    redis = connect(own_redis.url)
    worker = Metrics(redis)
    worker.add("chorus_attempts", "ok")
    await worker.flush()
    own_redis.kill()
    worker.add("chorus_attempts", "ok")
    with pytest.raises(RedisUnavailable):
        await worker.flush()
    assert value(await worker.render(NOBODY), "chorus_redis_up") == 0
    own_redis.start()

    text = await worker.render(NOBODY)
    again = await worker.render(NOBODY)

    assert value(text, 'chorus_attempts_total{status="ok"}') == 2
    assert value(again, 'chorus_attempts_total{status="ok"}') == 2
    assert await redis.hlen(KEY) == 1
    await redis.aclose()


async def test_engines_that_are_away(redis: Client) -> None:
    """A replica that does not answer is down, without numbers."""
    engine = FakeEngine(lambda _: [[2]])
    engine.ready = None

    text = await Metrics(redis).render(ReplicaSet([engine]))

    assert value(text, 'chorus_engine_up{replica="0"}') == 0
    assert b"chorus_engine_running{" not in text
