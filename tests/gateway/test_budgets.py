"""Budgets, plans, limits of single models, modes of limits and top-ups, as clients meet them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio as redis

from engine.protocol import Generate
from gateway import inference
from tenants.slots import TenantSlot
from tests.gateway.live import Live
from tests.gateway.scripted import Script, chat, error_of
from tests.gateway.test_limits import PATH, limited, remaining

pytestmark = pytest.mark.asyncio(loop_scope="module")
ADMIN = "/admin/v1"


async def scrape(live: Live, name: str) -> list[str]:
    text = (await (await live.http()).get("/metrics")).text
    return [line for line in text.splitlines() if line.startswith(name)]


@pytest.mark.parametrize("period", ["day", "month"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_spent_budget(server: Live, period: str, stream: bool) -> None:
    """T27, QB-12: 429 insufficient_quota, never 402 or 403, with the limit's name and numbers, x-should-retry false and
    no Retry-After; the engine is not asked; what was left unused of a reservation is there again."""
    client = await limited(server, f"budget-{period}-{stream}", **{f"tokens_per_{period}": 100})
    first = await client.post(PATH, json=chat(max_tokens=60, stream=stream))
    assert first.status_code == 200, first.text
    await client.post(PATH, json=chat(max_tokens=60, stream=stream))
    asked = len(server.engine.requests)

    answer = await client.post(PATH, json=chat(max_tokens=95, stream=stream))

    error = error_of(answer)
    assert answer.status_code == 429
    assert (error["type"], error["code"], error["param"]) == ("insufficient_quota", "insufficient_quota", None)
    assert f"tokens per {period}" in error["message"]
    assert "Limit 100, Used " in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & set(answer.headers)
    assert (asked, len(server.engine.requests)) == (2, 2)


async def test_sdk_does_not_retry_a_spent_budget(server: Live) -> None:
    """T25, T27: the SDK with two retries calls once for a spent budget, and comes again for a rate that says when."""
    await limited(server, "sdk-budget", tokens_per_day=1)
    calls: list[httpx.Response] = []

    async def note(answer: httpx.Response) -> None:
        calls.append(answer)

    sdk = await server.openai(await server.key("sdk-budget"), max_retries=2)
    sdk._client.event_hooks["response"].append(note)
    with pytest.raises(openai.RateLimitError) as caught:
        await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "insufficient_quota"
    assert len(calls) == 1

    await limited(server, "sdk-budget", tokens_per_day=None, requests_per_minute=120)
    for _ in range(121):
        await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=1)
    assert [call.status_code for call in calls[1:]].count(200) == 121


@pytest.mark.parametrize(
    ("limits", "code", "kind", "told"),
    [({"requests_per_minute": 0}, "rate_limit_exceeded", "requests", "requests per min: Limit 0, Used 0, Requested 1."),
     ({"tokens_per_minute": 1}, "rate_limit_exceeded", "tokens", "tokens per min: Limit 1, Used 0, Requested "),
     ({"concurrency": 0}, "rate_limit_exceeded", "requests", "concurrent requests: Limit 0, Used 0, Requested 1."),
     ({"tokens_per_day": 1}, "insufficient_quota", "insufficient_quota", "tokens per day "),
     ({"tokens_per_month": 1}, "insufficient_quota", "insufficient_quota", "tokens per month ")],
)  # fmt: skip
@pytest.mark.parametrize("scope", ["tenant", "key", "model", "plan", "plan-model"])
async def test_every_limit_in_every_scope(
    server: Live, limits: dict[str, int], scope: str, code: str, kind: str, told: str
) -> None:
    """QB-09, QB-12, QB-15: each dimension for tenant, key and model, own or of a plan, is enforced on every endpoint,
    turns of a conversation too, stream on or off, and told apart by code, type and words; whoever is narrower
    decides."""
    admin = await server.http()
    name = f"cell-{scope}-{next(iter(limits))}".replace("_", "-")
    await server.key(name)
    for_model = {"model_limits": {"tiny": limits}}
    if scope.startswith("plan"):
        body = for_model if scope == "plan-model" else {"limits": limits}
        assert (await admin.post(f"{ADMIN}/plans", json={"id": name, **body})).status_code == 201
        patch: dict[str, Any] = {"plan": name}
    else:
        patch = {"tenant": {"limits": limits}, "model": for_model}.get(scope, {})
    assert (await admin.patch(f"{ADMIN}/tenants/{name}", json=patch)).status_code == 200
    own = limits if scope == "key" else {}
    made = await admin.post(f"{ADMIN}/tenants/{name}/keys", json={"name": "k", "limits": own})
    client = await server.http(made.json()["key"])
    talk = (await client.post("/v1/conversations", json={})).json()["id"]

    for path, body in (
        (PATH, chat(max_tokens=16)), ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/v1/responses", {"model": "tiny", "input": "x", "conversation": talk}),
    ):  # fmt: skip
        for stream in (False, True):
            answer = await client.post(path, json={**body, "stream": stream})
            assert answer.status_code == 429, (path, answer.text)
            error = error_of(answer)
            assert (error["code"], error["type"], error["param"]) == (code, kind, None)
            assert told in error["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            assert f"this {scope.replace('plan-', '').replace('plan', 'tenant')}" in error["message"]
    assert not server.engine.requests


async def test_soft_and_shadow_let_through(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A soft budget and a limit in shadow mode refuse nothing, leave no headers, and are logged and counted for the
    operator."""
    caplog.set_level("INFO", "tenants.quotas")
    admin = await server.http()
    key = await server.key("lenient")
    limits: dict[str, Any] = {"requests_per_minute": 1, "tokens_per_day": 1}
    limits |= {"soft": ["tokens_per_day"], "shadow": ["requests_per_minute"]}
    assert (await admin.patch(f"{ADMIN}/tenants/lenient", json={"limits": limits})).status_code == 200
    client = await server.http(key)

    for _ in range(3):
        answer = await client.post(PATH, json=chat(max_tokens=5))
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]

    told = [record.message for record in caplog.records if "tenant lenient" in record.message]
    assert sum("above the shadow limit" in message for message in told) == 2
    assert sum("above the soft limit" in message for message in told) == 3
    lines = await scrape(server, "chorus_limits_let_through_total")
    assert 'chorus_limits_let_through_total{limit="tokens_per_day",mode="soft",scope="tenant"} 3.0' in lines
    assert 'chorus_limits_let_through_total{limit="requests_per_minute",mode="shadow",scope="tenant"} 2.0' in lines


@pytest.mark.parametrize("limit", [1_000, 200])
async def test_long_answers_are_topped_up(server: Live, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Without max_tokens an estimate is reserved and added to while the answer grows; where a limit refuses more, the
    text is not cut and the debt is charged while the answer still runs."""
    monkeypatch.setattr(inference, "UNLIMITED_ESTIMATE", 50)
    tenant = f"growing-{limit}"
    client = await limited(server, tenant, tokens_per_day=limit)
    server.engine._reply = lambda request: [[60] * 300 + [2]]  # type: ignore[method-assign, assignment]
    server.engine._delay_s = 0.004
    bucket = TenantSlot(tenant).bucket("tenant", "tokens:day")
    store = redis.Redis.from_url(server.settings.redis_url, decode_responses=True)
    levels = []

    running = asyncio.create_task(client.post(PATH, json=chat()))
    while not running.done():
        levels.append(float(await store.hget(bucket, "used") or 0))
        await asyncio.sleep(0.02)
    usage = (await running).json()["usage"]
    spent = float(await store.hget(bucket, "used") or 0)
    await store.aclose()

    assert usage["completion_tokens"] == 301
    assert spent == usage["total_tokens"]
    assert max(levels) > 250
    assert len(set(levels)) > 4
    if limit == 200:
        assert (await client.post(PATH, json=chat(max_tokens=1))).status_code == 429


async def test_max_tokens_is_never_topped_up(server: Live) -> None:
    """What the client bounded was reserved whole at admission."""
    script = Script(["a b c d e f g h"]).install(server)
    client = await limited(server, "bounded", tokens_per_day=100)
    gate = script.gate = asyncio.Event()

    running = asyncio.create_task(client.post(PATH, json=chat(max_tokens=8, n=3)))
    await script.started.wait()
    await asyncio.sleep(0.05)
    request: Generate = script.requests[0]
    store = redis.Redis.from_url(server.settings.redis_url, decode_responses=True)
    held = float(await store.hget(TenantSlot("bounded").bucket("tenant", "tokens:day"), "used") or 0)
    await store.aclose()
    gate.set()
    await running

    assert held == len(request.prompt) + 3 * 8


async def test_headers_show_the_tightest_rate(server: Live) -> None:
    """A model's limit below the tenant's is what the client reads."""
    admin = await server.http()
    client = await limited(server, "tightest", requests_per_minute=100)
    await admin.patch(f"{ADMIN}/tenants/tightest", json={"model_limits": {"tiny": {"requests_per_minute": 10}}})

    answer = await client.post(PATH, json=chat(max_tokens=1))

    assert answer.headers["x-ratelimit-limit-requests"] == "10"
    assert remaining(answer, "requests") == 9


async def test_plans_over_http(server: Live) -> None:
    """The life of a plan: 201, 409, list, replace, 409 while in use, gone."""
    admin = await server.http()
    made = await admin.post(f"{ADMIN}/plans", json={"id": "gold", "limits": {"concurrency": 3}})
    assert made.status_code == 201
    assert made.json()["limits"]["concurrency"] == 3
    again = await admin.post(f"{ADMIN}/plans", json={"id": "gold"})
    assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
    await server.key("on-gold")
    shown = await admin.patch(f"{ADMIN}/tenants/on-gold", json={"plan": "gold"})
    assert shown.json()["plan"] == "gold"
    assert "gold" in [row["id"] for row in (await admin.get(f"{ADMIN}/plans")).json()["data"]]
    body = {"model_limits": {"tiny": {"tokens_per_day": 5}}}
    changed = await admin.put(f"{ADMIN}/plans/gold", json=body)
    assert changed.json()["limits"]["concurrency"] is None
    assert (await admin.get(f"{ADMIN}/plans/gold")).json() == changed.json()
    assert (await admin.delete(f"{ADMIN}/plans/gold")).status_code == 409
    await admin.patch(f"{ADMIN}/tenants/on-gold", json={"plan": None})
    assert (await admin.delete(f"{ADMIN}/plans/gold")).json()["deleted"] is True
    assert error_of(await admin.get(f"{ADMIN}/plans/gold"))["code"] == "plan_not_found"
    refused = await admin.patch(f"{ADMIN}/tenants/on-gold", json={"plan": "gold"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "plan")
