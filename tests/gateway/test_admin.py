"""Admin REST: tenants, keys, usage; who may do it, what is refused, what is written down."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.live import ADMIN_KEY, Live

TENANTS = "/admin/v1/tenants"


@pytest.fixture
async def admin(live: Live) -> httpx.AsyncClient:
    return await live.http()


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


async def test_life_of_a_tenant(admin: httpx.AsyncClient) -> None:
    """Only the id is required; a patch changes what it names, inside limits too; deleting it is final."""
    made = await admin.post(TENANTS, json={"id": "acme"})
    unlimited = {
        "requests_per_minute": None, "tokens_per_minute": None, "concurrency": None, "tokens_per_day": None,
        "tokens_per_month": None, "soft": [], "shadow": [],
    }  # fmt: skip
    assert made.status_code == 201
    assert made.json() | {"created_at": 0} == {
        "object": "tenant", "id": "acme", "name": "acme", "weight": 1.0, "priority": "standard", "models": None,
        "limits": unlimited, "model_limits": {}, "adapter_limits": {}, "plan": None, "model_names": {},
        "unknown_fields": "reject", "retention": None, "suspended": False, "created_at": 0,
    }  # fmt: skip
    assert error(await admin.post(TENANTS, json={"id": "acme"}), 409)["param"] == "id"

    await admin.patch(f"{TENANTS}/acme", json={"limits": {"concurrency": 3, "tokens_per_minute": 10}, "weight": 2})
    changed = await admin.patch(f"{TENANTS}/acme", json={"limits": {"concurrency": None}, "models": ["a*"]})
    assert changed.status_code == 200
    assert changed.json() == made.json() | {
        "weight": 2.0, "models": ["a*"], "limits": unlimited | {"tokens_per_minute": 10},
    }  # fmt: skip
    assert (await admin.get(f"{TENANTS}/acme")).json() == changed.json()

    gone = await admin.delete(f"{TENANTS}/acme")
    assert gone.json() == {
        "object": "tenant.deleted", "id": "acme", "deleted": True,
        "erased": ["keys", "adapters", "responses", "conversations", "idempotent_answers", "kv_blocks"],
        "kept": ["usage", "audit"],
    }  # fmt: skip
    for answer in (
        await admin.get(f"{TENANTS}/acme"),
        await admin.patch(f"{TENANTS}/acme", json={"weight": 1}),
        await admin.delete(f"{TENANTS}/acme"),
        await admin.post(f"{TENANTS}/acme/keys", json={"name": "k"}),
        await admin.get(f"{TENANTS}/acme/keys"),
        await admin.get(f"{TENANTS}/acme/adapters"),
    ):
        assert error(answer, 404)["code"] == "tenant_not_found"


async def test_a_conflict_is_not_tried_again(admin: httpx.AsyncClient) -> None:
    """T28: SDKs repeat 409 by themselves unless they are told not to."""
    await admin.post(TENANTS, json={"id": "acme"})

    assert (await admin.post(TENANTS, json={"id": "acme"})).headers["x-should-retry"] == "false"


async def test_lists_come_in_pages(admin: httpx.AsyncClient) -> None:
    """Walking the pages gives each tenant once, in the order of ids; limits and cursors are checked."""
    names = [f"t{i:02}" for i in range(11)]
    await asyncio.gather(*(admin.post(TENANTS, json={"id": name}) for name in reversed(names)))

    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await admin.get(TENANTS, params={"limit": 4, **after})).json()
        seen += [row["id"] for row in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", seen[-len(page["data"])], seen[-1])
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == names
    for query in ("limit=0", "limit=1001", "limit=x", "after=%00", "after="):
        assert error(await admin.get(f"{TENANTS}?{query}"), 400)["param"] == query.split("=")[0]


REFUSED: list[tuple[str, str, Any, str | None]] = [
    ("POST", "", {"id": "acme", "weigth": 2}, "weigth"),
    ("POST", "", {"id": "acme", "limits": {"rpm": 1}}, "limits.rpm"),
    ("POST", "", {"id": "acme", "limits": {"concurrency": -1}}, "limits.concurrency"),
    ("POST", "", {"id": "acme", "limits": {"concurrency": "3"}}, "limits.concurrency"),
    ("POST", "", {"id": "acme", "limits": {"concurrency": True}}, "limits.concurrency"),
    ("POST", "", {"id": "acme", "weight": 0}, "weight"),
    ("POST", "", {"id": "acme", "weight": "1"}, "weight"),
    ("POST", "", {"id": "acme", "priority": "urgent"}, "priority"),
    ("POST", "", {"id": "acme", "models": "a*"}, "models"),
    ("POST", "", {"id": "acme", "name": ""}, "name"),
    ("POST", "", {"name": "acme"}, "id"),
    ("POST", "", {"id": "../x"}, "id"),
    ("POST", "", {"id": ""}, "id"),
    ("POST", "", {"id": "a" * 65}, "id"),
    ("POST", "", {"id": "é"}, "id"),
    ("POST", "", {"id": 1}, "id"),
    ("POST", "", {"id": "acme", "no such": 1}, "no such"),
    ("POST", "", [], None),
    ("PATCH", "/beta", {"id": "other"}, "id"),
    ("PATCH", "/beta", {"weight": None}, "weight"),
    ("PATCH", "/beta", {"limits": {"concurrency": 1.5}}, "limits.concurrency"),
    ("PATCH", "/beta", {"limits": {"soft": ["concurrency"]}}, "limits.soft"),
    ("PATCH", "/beta", {"plan": "none"}, "plan"),
    ("PATCH", "/beta", {"suspended": "yes"}, "suspended"),
    ("POST", "/beta/keys", {}, "name"),
    ("POST", "/beta/keys", {"name": "k", "scopes": ["root"]}, "scopes"),
    ("POST", "/beta/keys", {"name": "k", "scopes": "inference"}, "scopes"),
    ("POST", "/beta/keys", {"name": "k", "tenant": "gamma"}, "tenant"),
    ("POST", "/beta/keys", {"name": "k", "expires_at": "tomorrow"}, "expires_at"),
    ("POST", "/beta/keys", {"name": "k", "expires_at": "2030-01-01T00:00:00"}, "expires_at"),
]


async def test_bodies_are_strict(admin: httpx.AsyncClient) -> None:
    """An unknown field or a value that can't be is 400 and named; nothing is changed by it."""
    await admin.post(TENANTS, json={"id": "beta"})
    before = (await admin.get(TENANTS)).json()
    for method, path, body, param in REFUSED:
        refused = error(await admin.request(method, TENANTS + path, json=body), 400)
        assert refused["param"] == param, (method, path, body, refused)
    assert (await admin.get(TENANTS)).json() == before
    assert (await admin.get(f"{TENANTS}/beta/keys")).json()["data"] == []


async def test_broken_bodies(admin: httpx.AsyncClient) -> None:
    """HT-01 on admin routes: what is not one JSON object in UTF-8 is 400 in OpenAI's shape, never 500."""
    for raw in (
        b"{x", b"", b"\xff\xfe", b'{"id":"\xff"}', '{"id":"a"}'.encode("utf-16"), b"null", b"[]", b'"s"',
        b'{"id":"a","id":"b"}', b'{"id":"a","weight":NaN}', b"[" * 100_000, b'{"id":"\\ud800"}',
    ):  # fmt: skip
        for method, path in (("POST", TENANTS), ("PATCH", f"{TENANTS}/x"), ("POST", f"{TENANTS}/x/keys"),
                             ("POST", "/admin/v1/adapters/a/activate")):  # fmt: skip
            answer = await admin.request(method, path, content=raw, headers={"content-type": "application/json"})
            assert error(answer, 400)["type"] == "invalid_request_error", (raw[:20], path)
    assert (await admin.get(TENANTS)).json()["data"] == []


async def test_env_references_stay_text(admin: httpx.AsyncClient) -> None:
    """AU-11: what looks like a reference to the environment is kept as the text that it is."""
    for i, text in enumerate(("os.environ/DATABASE_URL", "${REDIS_URL}", "{{env}}", "$(id)")):
        made = await admin.post(TENANTS, json={"id": f"t{i}", "name": text, "models": [text]})
        assert (made.json()["name"], made.json()["models"]) == (text, [text])
        assert error(await admin.post(TENANTS, json={"id": text}), 400)["param"] == "id"


async def test_odd_paths_are_not_found(admin: httpx.AsyncClient) -> None:
    """AU-05: a path that can't be an id is 404 without a look-up; nothing escapes into files or SQL."""
    await admin.post(TENANTS, json={"id": "acme"})
    for odd in ("..%2f..%2fetc", "%00", "%2e%2e", "a%0ab", "'%20or%201=1", "é", "a" * 5000, "C:%5cx"):
        for path in (f"{TENANTS}/{odd}", f"{TENANTS}/acme/keys/{odd}", f"{TENANTS}/acme/adapters/{odd}",
                     f"{TENANTS}/{odd}/adapters", f"/admin/v1/adapters/{odd}"):  # fmt: skip
            error(await admin.get(path), 404)


async def test_life_of_a_key(live: Live, admin: httpx.AsyncClient) -> None:
    """A key is shown once, works, is listed without its secret, and is unknown as soon as it is revoked."""
    await admin.post(TENANTS, json={"id": "acme"})
    made = await admin.post(f"{TENANTS}/acme/keys", json={"name": "prod", "expires_at": 4_000_000_000})
    assert made.status_code == 201
    key = made.json().pop("key")
    shown = {name: value for name, value in made.json().items() if name != "key"}
    assert key.startswith("chorus_live_")
    assert (shown["scopes"], shown["tenant"], shown["expires_at"]) == (["inference"], "acme", 4_000_000_000)

    caller = await live.http(key)
    assert (await caller.get("/v1/models")).status_code == 200
    listed = await admin.get(f"{TENANTS}/acme/keys")
    assert listed.json()["data"] == [shown]
    assert key.split("_")[-2] not in listed.text
    assert (await admin.get(f"{TENANTS}/acme/keys/{shown['id']}")).json() == shown

    gone = await admin.delete(f"{TENANTS}/acme/keys/{shown['id']}")
    assert gone.json() == {"object": "api_key.deleted", "id": shown["id"], "deleted": True}
    assert error(await caller.get("/v1/models"), 401)["code"] == "invalid_api_key"
    assert (await admin.get(f"{TENANTS}/acme/keys/{shown['id']}")).json()["revoked_at"] is not None


async def test_keys_belong_to_their_tenant(admin: httpx.AsyncClient) -> None:
    """A key is not found under another tenant, and can't be revoked from there."""
    for tenant in ("acme", "globex"):
        await admin.post(TENANTS, json={"id": tenant})
    key_id = (await admin.post(f"{TENANTS}/acme/keys", json={"name": "k"})).json()["id"]

    assert error(await admin.get(f"{TENANTS}/globex/keys/{key_id}"), 404)["code"] == "key_not_found"
    assert error(await admin.delete(f"{TENANTS}/globex/keys/{key_id}"), 404)["code"] == "key_not_found"
    assert (await admin.get(f"{TENANTS}/acme/keys/{key_id}")).json()["revoked_at"] is None


async def test_limits_and_suspension_act_at_once(live: Live, admin: httpx.AsyncClient) -> None:
    """What an admin changes counts at the very next request."""
    caller = await live.openai(await live.key("acme"))
    await caller.responses.create(model="tiny", input="hi")
    raw = await live.http(caller.api_key)
    body = {"model": "tiny", "input": "hi"}

    await admin.patch(f"{TENANTS}/acme", json={"limits": {"requests_per_minute": 0}})
    assert error(await raw.post("/v1/responses", json=body), 429)["code"] == "rate_limit_exceeded"
    await admin.patch(f"{TENANTS}/acme", json={"limits": {"requests_per_minute": None}, "models": ["other"]})
    assert error(await raw.post("/v1/responses", json=body), 404)["code"] == "model_not_found"
    await admin.patch(f"{TENANTS}/acme", json={"models": None, "suspended": True})
    error(await raw.post("/v1/responses", json=body), 401)
    await admin.patch(f"{TENANTS}/acme", json={"suspended": False})
    assert (await raw.post("/v1/responses", json=body)).status_code == 200


def _admin_routes(live_openapi: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (method.upper(), path)
        for path, methods in live_openapi["paths"].items()
        for method in methods
        if path.startswith("/admin/")
    ]


async def test_admin_routes_need_the_admin_key(live: Live, admin: httpx.AsyncClient) -> None:
    """AU-02, AU-01: on each admin route and method a tenant's key is 403 and no key is 401, and nothing happens."""
    key = await live.key("acme", "inference", "adapters:write")
    before = (await admin.get(TENANTS)).json()
    routes = _admin_routes((await admin.get("/openapi.json")).json())
    assert len(routes) >= 20
    for method, path in routes:
        url = path.replace("{tenant}", "acme").replace("{key_id}", "x").replace("{name}", "x")
        for headers, status in (
            ({"authorization": f"Bearer {key}"}, 403),
            ({}, 401),
            ({"authorization": "Bearer"}, 401),
        ):
            async with httpx.AsyncClient(base_url=live.url) as stranger:
                answer = await stranger.request(method, url, json={"id": "evil", "name": "evil"}, headers=headers)
            assert error(answer, status)["type"] == "invalid_request_error", (method, path)
    assert (await admin.get(TENANTS)).json() == before
    assert (await admin.get(f"{TENANTS}/acme")).status_code == 200


async def test_the_admin_key_is_not_for_inference(live: Live, admin: httpx.AsyncClient) -> None:
    """The two classes of keys don't mix: the admin key is 403 where a tenant's is needed."""
    for method, path in (
        ("POST", "/v1/responses"), ("GET", "/v1/responses/x"), ("POST", "/v1/conversations"), ("GET", "/v1/models"),
        ("GET", "/v1/adapters"), ("POST", "/v1/adapters"), ("POST", "/v1/chat/completions"),
    ):  # fmt: skip
        assert error(await admin.request(method, path, json={}), 403)["code"] == "insufficient_permissions"


async def test_every_act_is_audited(live: Live, admin: httpx.AsyncClient) -> None:
    """One audit row per act, with actor, before and after, and the request that asked for it; none for a refusal."""
    made = await admin.post(TENANTS, json={"id": "acme"})
    await admin.post(TENANTS, json={"id": "acme"})
    await admin.patch(f"{TENANTS}/acme", json={"weight": 2})
    key_id = (await admin.post(f"{TENANTS}/acme/keys", json={"name": "k"})).json()["id"]
    await admin.delete(f"{TENANTS}/acme/keys/{key_id}")
    await admin.delete(f"{TENANTS}/acme")

    rows = await live.audit()

    assert [row.action for row in rows] == [
        "tenant.create",
        "tenant.update",
        "key.create",
        "key.revoke",
        "tenant.delete",
    ]
    assert {row.actor for row in rows} == {"admin"}
    assert rows[0].request_id == made.headers["x-request-id"]
    assert rows[1].before is not None
    assert rows[1].after is not None
    assert (rows[1].before["weight"], rows[1].after["weight"]) == (1.0, 2.0)
    assert all(ADMIN_KEY not in str(vars(row)) for row in rows)


async def test_usage_sums_the_ledger(live: Live, admin: httpx.AsyncClient) -> None:
    """Usage equals what the answers said, by tenant, key, model and day; other tenants' is not in it."""
    totals: dict[str, list[int]] = {}
    for tenant, num in (("acme", 3), ("globex", 2)):
        caller = await live.openai(await live.key(tenant))
        for _ in range(num):
            usage = (await caller.responses.create(model="tiny", input="hi there")).usage
            assert usage is not None
            found = totals.setdefault(tenant, [0, 0, 0])
            found[0] += 1
            found[1] += usage.input_tokens
            found[2] += usage.output_tokens

    rows: list[dict[str, Any]] = []
    for _ in range(200):
        rows = (await admin.get("/admin/v1/usage", params={"group_by": "tenant"})).json()["data"]
        if sum(row["num_requests"] for row in rows) == 5:
            break
        await asyncio.sleep(0.05)

    sums = {row["tenant"]: [row["num_requests"], row["prompt_tokens"], row["completion_tokens"]] for row in rows}
    assert sums == totals
    one = (await admin.get("/admin/v1/usage", params={"tenant": "acme", "group_by": "day,model,key"})).json()["data"]
    assert len(one) == 1
    assert (one[0]["model"], one[0]["num_requests"], len(one[0]["day"])) == ("tiny", 3, 10)
    assert (await admin.get("/admin/v1/usage", params={"end": "2020-01-01T00:00:00Z"})).json()["data"][0][
        "num_requests"
    ] == 0
    for query in ("group_by=moon", "group_by=day,day", "start=yesterday", "tenant=%00"):
        assert error(await admin.get(f"/admin/v1/usage?{query}"), 400)["param"] == query.split("=")[0]
