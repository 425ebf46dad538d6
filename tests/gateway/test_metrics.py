"""/metrics: one sum over all workers, kept in Redis; gauges of the engines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import AdapterState, ClassState, LaneState, Stats, TierState
from gateway.engine_metrics import STRUCTURED, collect
from gateway.metrics import FAMILIES, KEY, Metrics
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


async def test_the_engine_tells_who_waits_for_what(live: Live) -> None:
    """Running, paused and waiting by class and cause, blocks, preemptions by kind, failures by code, arrivals by tier
    are in /metrics; lanes are in GET /admin/v1/engine only, which needs the admin key."""
    numbers = dict.fromkeys((name for name in Stats.__struct_fields__ if name not in STRUCTURED), 7)
    live.engine.stats = Stats(
        **numbers | {"boot_id": "boot", "blocks_total": 20},  # type: ignore[arg-type]
        adapters=[AdapterState("0" * 64, "resident", 100, 2)],
        classes=[ClassState(0, 1, 0, 0, 0, 0), ClassState(1, 2, 3, 4, 0, 5, 6), ClassState(2, 0, 0, 6, 0, 0)],
        lanes=[LaneState("acme", 1, 2, 9, 700.0, 350.0)],
        preemptions={"pause": 1, "blocks": 2, "adapter": 3},
        failures={"deadline": 4},
        arrivals={"resident": 5, "disk": 6},
        kv_tiers=[TierState("host", 3, 300, 900, 11, 12, 13, 0), TierState("disk", 4, 400, 1000, 21, 22, 23, 24)],
        resumed={"swap": 8, "recompute": 9, "kept": 10},
        speeds={"copy_bytes": 1e9},
    )
    admin = await live.http(ADMIN_KEY)

    text = (await admin.get("/metrics")).content
    for sample, expected in {
        'chorus_engine_sequences{class="standard",replica="0",state="paused"}': 3,
        'chorus_engine_sequences{class="standard",replica="0",state="swapped"}': 6,
        'chorus_engine_waiting_for{cause="adapter",class="standard",replica="0"}': 5,
        'chorus_engine_waiting_for{cause="row",class="batch",replica="0"}': 6,
        'chorus_engine_blocks{replica="0",state="free",tier="device"}': 6,
        'chorus_engine_blocks{replica="0",state="cached",tier="host"}': 3,
        'chorus_engine_kv_tier_bytes{replica="0",state="total",tier="disk"}': 1000,
        'chorus_engine_kv_tier_blocks_total{event="hits",replica="0",tier="host"}': 11,
        'chorus_engine_kv_tier_blocks_total{event="faults",replica="0",tier="disk"}': 24,
        'chorus_engine_resumed_total{how="swap",replica="0"}': 8,
        'chorus_engine_kv_speed{of="copy_bytes",replica="0"}': 1e9,
        'chorus_engine_preemptions_by_kind_total{kind="pause",replica="0"}': 1,
        'chorus_engine_failures_total{code="deadline",replica="0"}': 4,
        'chorus_engine_requests_total{replica="0",tier="disk"}': 6,
        'chorus_engine_adapters{replica="0",state="resident"}': 1,
        'chorus_engine_adapter_read_seconds_total{replica="0"}': 7,
    }.items():
        assert value(text, sample) == expected
    assert b"acme" not in text

    engine = (await admin.get("/admin/v1/engine")).json()["data"][0]
    assert engine["lanes"] == [
        {"lane": "acme", "priority": "standard", "running": 2, "waiting": 9, "service": 700.0, "counter": 350.0}
    ]
    assert engine["classes"][1]["waiting_adapter"] == 5
    assert engine["kv_tiers"][1]["faults"] == 24
    assert engine["config"]["max_num_seqs"] == live.engine.ready.max_num_seqs  # type: ignore[union-attr]
    client = await live.http(await live.key("curious"))
    assert (await client.get("/admin/v1/engine")).status_code == 403


def documented(title: str) -> set[str]:
    """The names in the first column of the table under this title of docs/operating.md."""
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    rows = [line.split("|")[1] for line in text.split(f"### {title}\n")[1].split("\n#")[0].splitlines() if "|" in line]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def test_every_metric_of_the_gateway_is_documented() -> None:
    """docs/operating.md names every metric of the gateway, and no other."""
    named = {f"chorus_{name.removesuffix('_total')}" for name in documented("Metrics of the gateway")}

    assert named == {*FAMILIES, "chorus_redis_up"}


def test_the_contract_of_names() -> None:
    """docs/operating.md names every metric of an engine, and no other."""
    named = documented("Metrics of the engine") | {"up"}
    engine = FakeEngine(lambda _: [])
    found = {metric.name.removeprefix("chorus_engine_") for metric in collect(ReplicaSet([engine]))}

    assert {name.removesuffix("_total") for name in named} == {name.removesuffix("_total") for name in found}
