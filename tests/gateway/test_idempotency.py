"""Idempotency-Key on administration: once done, the same answer again; another body or one in progress is 409."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import redis.asyncio as redis

from tests.gateway.live import Live
from tests.gateway.scripted import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS = "/admin/v1/tenants/idem/keys"


async def admin_of(server: Live) -> httpx.AsyncClient:
    await server.key("idem")
    return await server.http()


async def test_the_same_again(server: Live) -> None:
    """The second call changes nothing and gets the first one's answer, new key included, which lies nowhere readable;
    so does a refusal; other paths and callers have keys of their own."""
    admin, headers = await admin_of(server), {"idempotency-key": "one"}
    first = await admin.post(KEYS, json={"name": "a", "scopes": ["inference"]}, headers=headers)
    again = await admin.post(KEYS, json={"scopes": ["inference"], "name": "a"}, headers=headers)

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    names = [row["name"] for row in (await admin.get(KEYS)).json()["data"]]
    assert names.count("a") == 1
    store = redis.Redis.from_url(server.settings.redis_url)
    kept = [await store.get(name) for name in await store.keys("chorus:idempotency:*")]
    await store.aclose()
    assert kept
    assert not any(first.json()["key"].encode() in value for value in kept)
    assert (await admin.post("/admin/v1/tenants", json={"id": "idem"}, headers=headers)).status_code == 409
    assert (await admin.post("/admin/v1/tenants", json={"id": "idem"}, headers=headers)).headers["x-should-retry"]


async def test_another_body(server: Live) -> None:
    """409 that no SDK tries again, and nothing is done."""
    admin, headers = await admin_of(server), {"idempotency-key": "two"}
    assert (await admin.post(KEYS, json={"name": "b"}, headers=headers)).status_code == 201

    answer = await admin.post(KEYS, json={"name": "c"}, headers=headers)

    assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_mismatch")
    assert answer.headers["x-should-retry"] == "false"
    assert "c" not in [row["name"] for row in (await admin.get(KEYS)).json()["data"]]


async def test_at_the_same_time(server: Live) -> None:
    """Of ten at once one is done; the others get its answer, or 409 while it runs."""
    admin, headers = await admin_of(server), {"idempotency-key": "three"}
    answers = await asyncio.gather(*(admin.post(KEYS, json={"name": "d"}, headers=headers) for _ in range(10)))

    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 201}) == 1
    assert [row["name"] for row in (await admin.get(KEYS)).json()["data"]].count("d") == 1
    for answer in answers:
        if answer.status_code == 409:
            assert error_of(answer)["code"] == "idempotency_in_progress"
            assert answer.headers["retry-after"] == "1"


async def test_keys_that_cannot_be(server: Live) -> None:
    """Too long, or for an upload, is 400."""
    admin = await admin_of(server)
    answer = await admin.post(KEYS, json={"name": "x"}, headers={"idempotency-key": "x" * 256})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "idempotency-key")
    upload = await admin.post("/admin/v1/adapters", files={"config": b"{}"}, headers={"idempotency-key": "y"})
    assert (upload.status_code, error_of(upload)["param"]) == (400, "idempotency-key")
