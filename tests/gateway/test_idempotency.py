"""Idempotency-Key: once done, the same answer again; another body or one in progress is 409. On administration, uploads
and inference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from tests.gateway.live import Live
from tests.gateway.scripted import Script, chat, error_of
from tests.gateway.test_adapters_api import parts
from tests.waiting import until

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
    kept = [await store.get(name) for name in await store.keys("chorus:replay:*")]
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
    """Too long is 400."""
    admin = await admin_of(server)
    answer = await admin.post(KEYS, json={"name": "x"}, headers={"idempotency-key": "x" * 256})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "idempotency-key")


@pytest.fixture(scope="module")
def files(tiny_lora: Path) -> tuple[bytes, bytes]:
    config, weights = [(tiny_lora / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    return config, weights


async def test_uploads(server: Live, files: tuple[bytes, bytes]) -> None:
    """An upload sent again, with other boundaries and file names, gets the first answer and makes no second version;
    with one byte of the weights or the name changed it is 409; so is one that was refused."""
    admin, headers = await admin_of(server), {"idempotency-key": "upload"}
    path = "/admin/v1/tenants/idem/adapters"
    first = await admin.post(path, files=parts(files, "voice"), headers=headers)
    assert first.status_code == 201, first.text
    other_names = {name: ("other", part[1]) for name, part in parts(files, "voice").items()}
    again = await admin.post(path, files=other_names, headers=headers)
    assert (again.status_code, again.json(), again.headers["idempotency-replayed"]) == (201, first.json(), "true")
    config, weights = files
    for changed in (
        parts((config, weights[:-1] + b"x"), "voice"),
        parts(files, "voice2"),
        parts((b"{}", weights), "voice"),
    ):
        answer = await admin.post(path, files=changed, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_mismatch")
    assert [row["id"] for row in (await admin.get(path)).json()["data"]] == ["voice"]

    refused = [await admin.post(path, files=parts(files, "voice"), headers={"idempotency-key": "up2"}) for _ in "12"]
    assert [answer.status_code for answer in refused] == [409, 409]
    assert [answer.headers.get("idempotency-replayed") for answer in refused] == [None, "true"]
    tenant = await server.http(await server.key("idem", "adapters:write"))
    own = [await tenant.post("/v1/adapters", files=parts(files, "own"), headers=headers) for _ in "12"]
    assert [answer.status_code for answer in own] == [201, 201]
    assert own[0].json() == own[1].json()


async def test_an_upload_in_progress(server: Live, files: tuple[bytes, bytes]) -> None:
    """While one is read, another with its key is 409 at once; one that broke off may be tried again."""
    admin, headers = await admin_of(server), {"idempotency-key": "slow-upload"}
    path = "/admin/v1/tenants/idem/adapters"
    request = admin.build_request("POST", path, files=parts(files, "slow"), headers=headers)
    body, may_go_on = request.read(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:100]
        await may_go_on.wait()
        yield body[100:]

    kind = {"content-type": request.headers["content-type"]}
    for is_broken_off in (True, False):
        may_go_on.clear()
        first = asyncio.create_task(admin.post(path, content=slowly(), headers=headers | kind))
        await until_running(server, 1)
        second = await admin.post(path, files=parts(files, "slow"), headers=headers)
        assert (second.status_code, error_of(second)["code"]) == (409, "idempotency_in_progress")
        if is_broken_off:
            first.cancel()
            await until_running(server, 0)
            continue
        may_go_on.set()
        assert (await first).status_code == 201


async def until_running(server: Live, number: int) -> None:
    """Until so many of the administrators' requests with a key run."""
    async with redis.Redis.from_url(server.settings.redis_url) as store, asyncio.timeout(30):
        while True:
            names = await store.keys("chorus:replay:*")
            rows = [json.loads(value) for value in await store.mget(names) if value] if names else []
            if sum("status" not in row for row in rows) == number:
                return
            await asyncio.sleep(0.02)


async def entries(server: Live, tenant: str) -> list[Any]:
    """Once there are any: what was settled before them is there then, too."""
    admin = await server.http()
    found: list[Any] = []
    for _ in range(400):
        found = (await admin.get(f"/admin/v1/usage/entries?tenant={tenant}")).json()["data"]
        if found:
            break
        await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_inference(server: Live, path: str, stream: bool) -> None:
    """T32, T29: the same request gets the same bytes again, streams whole; it is computed, counted and billed once.
    Another body is 409; another tenant, key or route has keys of its own."""
    tenant = f"idem{path.replace('/', '-')}-{stream}".lower()
    client = await server.http(await server.key(tenant))
    body: dict[str, Any] = {
        "/v1/chat/completions": chat(), "/v1/completions": {"model": "tiny", "prompt": "hi"},
        "/v1/responses": {"model": "tiny", "input": "hi"},
    }[path] | {"stream": stream}  # fmt: skip
    headers, computed = {"idempotency-key": "same"}, len(server.engine.requests)
    first = await client.post(path, json=body, headers=headers)
    again = await client.post(path, json=body, headers=headers)

    assert (first.status_code, first.headers.get("idempotency-replayed")) == (200, None)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (200, "true")
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(server.engine.requests) == computed + 1
    other = await client.post(path, json=body | {"temperature": 0.5}, headers=headers)
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_mismatch")
    assert len(await entries(server, tenant)) == 1
    stranger = await server.http(await server.key(f"{tenant}-2"))
    made = await (await server.http()).post(f"/admin/v1/tenants/{tenant}/keys", json={"name": "another"})
    for other_key, where in (
        (stranger, path), (await server.http(made.json()["key"]), path), (client, "/v1/responses/input_tokens"),
    ):  # fmt: skip
        sent = body if where == path else {"input": "hi"}
        fresh = await other_key.post(where, json=sent, headers=headers)
        assert (fresh.status_code, fresh.headers.get("idempotency-replayed")) == (200, None)


async def test_a_broken_stream_is_not_given_again(server: Live) -> None:
    """T32: what ended with a fault, or whose client left, is no answer: the same key does it anew."""
    client, headers = await server.http(await server.key("idem-broken")), {"idempotency-key": "s"}
    body = chat(stream=True)
    server.engine.fail_after = 1
    server.answers += ["one two three", "all of it"]
    broken = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert b'"error"' in broken.content
    server.engine.fail_after = None
    whole = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert whole.headers.get("idempotency-replayed") is None
    assert whole.content.endswith(b"data: [DONE]\n\n")
    again = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert again.content == whole.content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left(server: Live, stream: bool) -> None:
    """T49: the key changes nothing about leaving: the engine's work is given up at once, and the same key does the
    request anew as soon as that has ended."""
    script = Script(["a b c"], gate=asyncio.Event()).install(server)
    key = await server.key(f"idem-left-{stream}".lower())
    body, headers = chat(stream=stream), {"idempotency-key": "left", "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as leaver:
        task = asyncio.create_task(leaver.post("/v1/chat/completions", json=body))
        await until(lambda: bool(script.generations))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: script.generations[0].num_closed == 1, 1.0)
    script.gate = None
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        while answer.status_code == 409:
            assert error_of(answer)["code"] == "idempotency_in_progress"
            await asyncio.sleep(0.02)
            answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (200, None)
    assert len(script.generations) == 2


async def test_limits_are_not_kept(server: Live) -> None:
    """429 may be another answer the next time; what is given again is not charged."""
    key = await server.key("idem-limit")
    client, admin = await server.http(key), await server.http()
    for limit, status in ((0, 429), (1, 200), (1, 200), (0, 200)):
        await admin.patch("/admin/v1/tenants/idem-limit", json={"limits": {"concurrency": limit}})
        answer = await client.post("/v1/chat/completions", json=chat(), headers={"idempotency-key": "l"})
        assert answer.status_code == status, answer.text


async def test_a_revoked_key_gets_nothing_again(server: Live) -> None:
    """Nor one of a suspended tenant: 401, also for what it was answered before."""
    admin = await admin_of(server)
    made = (await admin.post(KEYS, json={"name": "revoked"})).json()
    client, headers = await server.http(made["key"]), {"idempotency-key": "r"}
    assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 200
    assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 200
    for change, status in (({"suspended": True}, 401), ({"suspended": False}, 200)):
        await admin.patch("/admin/v1/tenants/idem", json=change)
        assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == status
    await admin.delete(f"{KEYS}/{made['id']}")
    assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 401


async def test_nothing_is_kept_without_retention(server: Live) -> None:
    """With `retention: none` the request is still done once, but its answer is nowhere: 409; and what was kept before
    is gone."""
    client, admin = await server.http(await server.key("idem-none")), await server.http()
    kept = [await client.post("/v1/chat/completions", json=chat(), headers={"idempotency-key": "a"}) for _ in "12"]
    assert [answer.status_code for answer in kept] == [200, 200]
    await admin.patch("/admin/v1/tenants/idem-none", json={"retention": "none"})
    computed = len(server.engine.requests)
    for key in ("a", "b"):
        first, again = [
            await client.post("/v1/chat/completions", json=chat(), headers={"idempotency-key": key}) for _ in "12"
        ]
        assert (first.status_code, first.headers.get("idempotency-replayed")) == (200, None)
        assert (again.status_code, error_of(again)["code"]) == (409, "idempotency_not_kept")
    assert len(server.engine.requests) == computed + 2


async def test_answers_are_unreadable(server: Live) -> None:
    """What lies in Redis shows neither question nor answer, and what somebody changed there is not given."""
    client = await server.http(await server.key("idem-seal"))
    server.answers.append("a very secret answer")
    body, headers = chat(), {"idempotency-key": "x"}
    assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    store = redis.Redis.from_url(server.settings.redis_url)
    (name,) = await store.keys("{t:idem-seal}:replay:*")
    value = json.loads(await store.get(name))
    assert "secret" not in str(value)
    assert b"secret" not in bytes.fromhex(value["body"])
    value["body"] = value["body"][:-2] + ("00" if value["body"][-2:] != "00" else "11")
    await store.set(name, json.dumps(value))
    await store.aclose()
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_not_kept")
