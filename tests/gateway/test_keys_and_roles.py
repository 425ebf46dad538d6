"""Keys on the wire: roles, rotation, addresses, legacy keys and names, service keys, last use."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.live import Live, serve
from tests.gateway.scripted import chat, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH, ADMIN = "/v1/chat/completions", "/admin/v1"


async def admin_key(live: Live, role: str) -> httpx.AsyncClient:
    made = await (await live.http()).post(f"{ADMIN}/admin-keys", json={"name": f"the {role}", "role": role})
    assert made.status_code == 201, made.text
    return await live.http(made.json()["key"])


async def new_key(live: Live, tenant: str, **values: Any) -> dict[str, Any]:
    await live.key(tenant)
    made = await (await live.http()).post(f"{ADMIN}/tenants/{tenant}/keys", json={"name": "k", **values})
    assert made.status_code == 201, made.text
    return dict(made.json())


async def test_roles(server: Live) -> None:
    """AU-02: a viewer reads and changes nothing; an operator changes tenants, not admin keys; the audit log
    names them."""
    viewer, operator, admin = [await admin_key(server, role) for role in ("viewer", "operator", "admin")]
    await server.key("roles")

    for client, tenants, keys in ((viewer, 403, 403), (operator, 200, 403), (admin, 200, 200)):
        assert (await client.get(f"{ADMIN}/tenants/roles")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.patch(f"{ADMIN}/tenants/roles", json={"weight": 2})).status_code == tenants
        assert (await client.get(f"{ADMIN}/admin-keys")).status_code == keys
        assert (await client.post(PATH, json=chat())).status_code == 403
    updates = [entry for entry in await server.audit() if (entry.target, entry.action) == ("roles", "tenant.update")]
    assert [entry.actor for entry in updates] == ["admin:the operator", "admin:the admin"]


async def test_a_viewer_changes_nothing(server: Live) -> None:
    """AU-02: every route of administration that is no GET is 403 for a viewer, whatever it is asked, before anything is
    looked up; every GET is open to it, but for admin keys."""
    viewer, admin = await admin_key(server, "viewer"), await server.http()
    document = (await admin.get("/openapi.json")).json()
    before = [(await admin.get(f"{ADMIN}/{what}")).json() for what in ("tenants", "plans", "admin-keys", "adapters")]

    tried = 0
    for path, methods in document["paths"].items():
        for method in methods if path.startswith("/admin/") else ():
            answer = await viewer.request(method, re.sub(r"{[^}]*}", "x", path), json={} if method != "get" else None)
            is_closed = method != "get" or "admin-keys" in path
            assert (answer.status_code == 403) == is_closed, (method, path, answer.text)
            tried += 1

    assert tried > 50
    after = [(await admin.get(f"{ADMIN}/{what}")).json() for what in ("tenants", "plans", "admin-keys", "adapters")]
    assert after == before


async def test_no_key_makes_a_key_with_more_rights(server: Live) -> None:
    """AU-09: an operator can make neither admin keys nor keys that act for any tenant, nor rotate or
    change one; nothing changes."""
    operator = await admin_key(server, "operator")
    service = await new_key(server, "more-rights", scopes=["inference", "act_as"])
    keys = f"{ADMIN}/tenants/more-rights/keys"
    before = (await operator.get(keys)).json()

    sha = hashlib.sha256(b"x").hexdigest()
    for path, body in (
        (f"{ADMIN}/admin-keys", {"name": "x", "role": "admin"}), (f"{ADMIN}/admin-keys/settings/restore", None),
        (keys, {"name": "x", "scopes": ["act_as"]}),
        (f"{keys}/import", {"name": "x", "scopes": ["act_as"], "sha256": sha}),
        (f"{keys}/{service['id']}/rotate", {}),
    ):  # fmt: skip
        answer = await operator.post(path, json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (403, "insufficient_permissions"), path
    plain = await new_key(server, "more-rights")
    for row, change in ((plain, {"scopes": ["act_as"]}), (service, {"models": None}), (service, {"allowed_ips": None})):
        answer = await operator.patch(f"{keys}/{row['id']}", json=change)
        assert (answer.status_code, error_of(answer)["code"]) == (403, "insufficient_permissions"), change
    assert [row for row in (await operator.get(keys)).json()["data"] if row["id"] != plain["id"]] == before["data"]
    assert (await (await server.http(service["key"])).post(keys, json={"name": "x"})).status_code == 403


async def test_a_key_is_changed(server: Live) -> None:
    """PATCH changes what it names, inside limits too, and nothing else; it acts at the next request; the audit log has
    before and after; what can't be is 400 with `param`, and a revoked key 404."""
    made = await new_key(server, "patch", limits={"requests_per_minute": 100, "concurrency": 5}, models=["tiny"])
    admin, client = await server.http(), await server.http(made["key"])
    path = f"{ADMIN}/tenants/patch/keys/{made['id']}"
    assert (await client.post(PATH, json=chat())).status_code == 200

    changed = await admin.patch(path, json={"name": "new", "limits": {"requests_per_minute": 0}})
    assert changed.status_code == 200, changed.text
    known = {name: value for name, value in made.items() if name not in ("key", "last_used_at")}
    limits = made["limits"] | {"requests_per_minute": 0}
    assert changed.json() == known | {"name": "new", "limits": limits, "last_used_at": changed.json()["last_used_at"]}
    assert (await client.post(PATH, json=chat())).status_code == 429
    for change, status in (
        ({"limits": {"requests_per_minute": None}, "models": []}, 404), ({"models": None}, 200),
        ({"allowed_ips": ["10.0.0.1"]}, 401), ({"allowed_ips": None}, 200), ({"scopes": ["adapters:write"]}, 403),
        ({"scopes": ["inference"]}, 200), ({"expires_at": 1}, 401), ({"expires_at": int(time.time()) + 60}, 200),
    ):  # fmt: skip
        assert (await admin.patch(path, json=change)).status_code == 200, change
        assert (await client.post(PATH, json=chat())).status_code == status, change
    acts = [entry for entry in await server.audit() if (entry.target, entry.action) == (made["id"], "key.update")]
    assert len(acts) == 9
    assert (acts[0].before or {})["limits"]["requests_per_minute"] == 100
    assert (acts[0].after or {})["limits"] | {"soft": [], "shadow": []} == limits
    assert acts[0].actor == "admin"
    for wrong, param in (
        ({"name": None}, "name"), ({"scopes": ["root"]}, "scopes"), ({"limits": {"concurrency": -1}}, None),
        ({"allowed_ips": ["x"]}, "allowed_ips"), ({"expires_at": "tomorrow"}, "expires_at"),
        ({"tenant": "x"}, "tenant"), ({"id": "x"}, "id"), ({"limits": None}, "limits"), ({"scopes": []}, "scopes"),
    ):  # fmt: skip
        answer = await admin.patch(path, json=wrong)
        assert (answer.status_code, error_of(answer)["param"] if param else None) == (400, param), wrong
    assert (await admin.patch(f"{ADMIN}/tenants/roles/keys/{made['id']}", json={})).status_code == 404
    await admin.delete(path)
    assert (await admin.patch(path, json={"name": "x"})).status_code == 404


async def test_switching_off_the_key_of_the_settings(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str
) -> None:
    """An admin switches CHORUS_ADMIN_KEY off: 401 from the next request on; it can't do that itself."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as live:
        root, admin = await live.http(), await admin_key(live, "admin")
        assert (await root.delete(f"{ADMIN}/admin-keys/settings")).status_code == 409
        assert (await admin.delete(f"{ADMIN}/admin-keys/settings")).status_code == 200
        assert (await root.get(f"{ADMIN}/tenants")).status_code == 401
        assert (await admin.post(f"{ADMIN}/admin-keys/settings/restore")).status_code == 200
        assert (await root.get(f"{ADMIN}/tenants")).status_code == 200


async def test_rotation(server: Live) -> None:
    """The new key has the same rights; the old one works until the overlap is over, then it is 401; a revoked one can't
    be rotated."""
    admin = await server.http()
    old = await new_key(server, "rotation", limits={"requests_per_minute": 5}, allowed_ips=["127.0.0.0/8"])
    keys = f"{ADMIN}/tenants/rotation/keys"

    made = await admin.post(f"{keys}/{old['id']}/rotate", json={"overlap_s": 60})
    assert made.status_code == 201, made.text
    new = made.json()
    assert new["rotated_from"] == old["id"]
    for name in ("name", "scopes", "limits", "models", "allowed_ips"):
        assert new[name] == old[name]
    for key in (old, new):
        assert (await (await server.http(key["key"])).post(PATH, json=chat())).status_code == 200
    last = (await admin.post(f"{keys}/{new['id']}/rotate", json={"overlap_s": 0.2})).json()
    await asyncio.sleep(0.3)
    for key, status in ((old, 200), (new, 401), (last, 200)):
        assert (await (await server.http(key["key"])).post(PATH, json=chat())).status_code == status
    assert (await admin.post(f"{keys}/{new['id']}/rotate", json={})).status_code == 404


async def test_addresses(server: Live) -> None:
    """A key may be bound to addresses: elsewhere it is 401 ip_not_authorized; a client can't claim to be elsewhere."""
    here = await new_key(server, "addresses", allowed_ips=["10.0.0.0/8", "127.0.0.1"])
    there = await new_key(server, "addresses", allowed_ips=["10.0.0.0/8"])
    refused = await (await server.http(there["key"])).post(PATH, json=chat(), headers={"x-forwarded-for": "10.1.1.1"})

    assert (await (await server.http(here["key"])).post(PATH, json=chat())).status_code == 200
    assert (refused.status_code, error_of(refused)["code"]) == (401, "ip_not_authorized")
    answer = await (await server.http()).post(
        f"{ADMIN}/tenants/addresses/keys", json={"name": "x", "allowed_ips": ["300.1.1.1"]}
    )
    assert (answer.status_code, error_of(answer)["param"]) == (400, "allowed_ips")


async def test_addresses_behind_a_proxy(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    """Of X-Forwarded-For counts what trusted proxies added, from the right, and nothing that a client wrote."""
    async with serve(
        tiny_llama, tmp_path / "data", sqlite_url, redis_url, trusted_proxies=("127.0.0.1", "192.168.0.0/16")
    ) as live:
        key = await new_key(live, "acme", allowed_ips=["10.0.0.0/8"])
        client = await live.http(key["key"])
        for header, status in (
            ("10.1.1.1", 200), ("8.8.8.8, 10.1.1.1, 192.168.3.4", 200), ("10.1.1.1, 8.8.8.8", 401), ("", 401),
        ):  # fmt: skip
            answer = await client.post(PATH, json=chat(), headers={"x-forwarded-for": header})
            assert answer.status_code == status, header


async def test_legacy_keys(server: Live) -> None:
    """A key of any form, imported by its SHA-256, works and is shown as legacy; twice is 409; revoked it is 401; others
    of such a form are 401."""
    admin = await server.http()
    await server.key("legacy")
    keys = f"{ADMIN}/tenants/legacy/keys"
    old = "sk-proj-Abc_123-något"
    body = {"name": "from before", "sha256": hashlib.sha256(old.encode()).hexdigest(), "hint": "…123"}
    client = await server.stack.enter_async_context(
        httpx.AsyncClient(base_url=server.url, headers={b"authorization": b"Bearer " + old.encode()}, verify=False)
    )
    assert (await client.post(PATH, json=chat())).status_code == 401

    made = await admin.post(f"{keys}/import", json=body)
    assert made.status_code == 201, made.text
    assert (made.json()["legacy"], made.json()["hint"], made.json().get("key")) == (True, "…123", None)
    assert (await admin.post(f"{keys}/import", json=body)).status_code == 409
    assert (await client.post(PATH, json=chat())).status_code == 200
    assert (await (await server.http("sk-proj-Abc_124")).post(PATH, json=chat())).status_code == 401

    assert (await admin.delete(f"{keys}/{made.json()['id']}")).status_code == 200
    assert (await client.post(PATH, json=chat())).status_code == 401


async def test_legacy_names(server: Live) -> None:
    """A tenant's own name for a model is exact, listed, and counts under the model's limits; nobody else has it; it is
    no way around an allow-list."""
    admin = await server.http()
    name = "ft:gpt-4o-mini:acme::7p4lURel/ü".ljust(256, "x")
    client = await server.http(await server.key("names"))
    changed = await admin.patch(f"{ADMIN}/tenants/names", json={"model_names": {name: "tiny", "gone": "nothing"}})
    assert changed.json()["model_names"] == {name: "tiny", "gone": "nothing"}

    longer = await admin.patch(f"{ADMIN}/tenants/names", json={"model_names": {name + "x": "tiny"}})
    assert (longer.status_code, error_of(longer)["param"]) == (400, "model_names")

    answer = await client.post(PATH, json={**chat(), "model": name})
    assert (answer.status_code, answer.json()["model"]) == (200, name)
    listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    assert name in listed
    assert "gone" not in listed
    assert (await client.post(PATH, json={**chat(), "model": name.upper()})).status_code == 404
    other = await server.http(await server.key("names-2"))
    assert (await other.post(PATH, json={**chat(), "model": name})).status_code == 404

    await admin.patch(f"{ADMIN}/tenants/names", json={"model_limits": {"tiny": {"tokens_per_day": 0}}})
    assert (await client.post(PATH, json={**chat(), "model": name})).status_code == 429
    await admin.patch(f"{ADMIN}/tenants/names", json={"models": [name], "model_limits": {}})
    assert (await client.post(PATH, json={**chat(), "model": name})).status_code == 404


async def test_service_keys(server: Live) -> None:
    """With act_as a key works for the tenant that x-chorus-tenant names, under that tenant's limits, and is billed to
    it; without it 403; suspension and revocation act at the next request."""
    admin = await server.http()
    service = await new_key(server, "service", scopes=["inference", "act_as"])
    client = await server.http(service["key"])
    plain = await server.http(await server.key("customer"))
    to = {"x-chorus-tenant": "customer"}
    assert (await client.post(PATH, json=chat(), headers=to)).status_code == 200
    assert (await plain.post(PATH, json=chat(), headers={"x-chorus-tenant": "service"})).status_code == 403
    assert (await plain.post(PATH, json=chat(), headers=to)).status_code == 200
    for unknown in ("nobody", "a/b", ""):
        assert (await client.post(PATH, json=chat(), headers={"x-chorus-tenant": unknown})).status_code == 404

    async def billed() -> int:
        return sum(row["num_requests"] for row in (await admin.get(f"{ADMIN}/usage?tenant=customer")).json()["data"])

    for _ in range(100):
        if await billed() == 2:
            break
        await asyncio.sleep(0.05)
    assert await billed() == 2

    await admin.patch(f"{ADMIN}/tenants/customer", json={"limits": {"requests_per_minute": 0}})
    assert (await client.post(PATH, json=chat(), headers=to)).status_code == 429
    assert (await client.post(PATH, json=chat())).status_code == 200
    await admin.patch(f"{ADMIN}/tenants/customer", json={"limits": {"requests_per_minute": None}, "suspended": True})
    assert (await client.post(PATH, json=chat(), headers=to)).status_code == 401
    await admin.patch(f"{ADMIN}/tenants/customer", json={"suspended": False})
    assert (await client.post(PATH, json=chat(), headers=to)).status_code == 200
    await admin.delete(f"{ADMIN}/tenants/service/keys/{service['id']}")
    assert (await client.post(PATH, json=chat(), headers=to)).status_code == 401


async def test_last_used(server: Live) -> None:
    """A key shows when it was last billed."""
    admin = await server.http()
    key = await new_key(server, "last-used")
    path = f"{ADMIN}/tenants/last-used/keys/{key['id']}"
    assert (await admin.get(path)).json()["last_used_at"] is None

    await (await server.http(key["key"])).post(PATH, json=chat())

    for _ in range(100):
        if (await admin.get(path)).json()["last_used_at"] is not None:
            break
        await asyncio.sleep(0.05)
    assert abs((await admin.get(path)).json()["last_used_at"] - time.time()) < 60
