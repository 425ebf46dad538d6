"""Usage and audit over HTTP: a tenant's own sums, single entries, corrections, export, the filters of the audit log."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from adapters.source_book import source_id
from gateway.app import ROUTERS
from tests.gateway.live import Live, serve
from tests.gateway.scripted import chat, error_of
from tests.gateway.test_adapters_api import adapters, parts

__all__ = ["adapters"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH, ADMIN = "/v1/chat/completions", "/admin/v1"


async def used(live: Live, tenant: str, count: int = 1, before: int = 0) -> list[dict[str, Any]]:
    """So many answers, and their entries in the ledger, newest first, with those of `before`."""
    client = await live.http(await live.key(tenant))
    for number in range(count):
        body = chat(user=f"u{number}", metadata={"team": "x"}, max_tokens=8)
        assert (await client.post(PATH, json=body)).status_code == 200
    admin = await live.http()
    for _ in range(100):
        found = (await admin.get(f"{ADMIN}/usage/entries?tenant={tenant}")).json()["data"]
        if len(found) >= count + before:
            return list(found)
        await asyncio.sleep(0.05)
    raise AssertionError("the entries did not come")


async def sums(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def test_a_tenant_sees_its_own(server: Live) -> None:
    """GET /v1/usage groups like the admin's and shows nobody else's; whole days and parts of a day agree."""
    await used(server, "own-1", 3)
    await used(server, "own-2", 1)
    client, admin = await server.http(await server.key("own-1")), await server.http()

    own = await sums(client, "/v1/usage?group_by=day,model,key")
    assert [(row["num_requests"], row["model"]) for row in own] == [(3, "tiny")]
    assert own == await sums(admin, f"{ADMIN}/usage?tenant=own-1&group_by=day,model,key")
    assert {row["tenant"] for row in await sums(client, "/v1/usage?group_by=tenant")} == {"own-1"}
    assert error_of(await client.get("/v1/usage?tenant=own-2"))["param"] == "tenant"
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    (part,) = await sums(client, f"/v1/usage?start={since}")
    (whole,) = await sums(client, "/v1/usage")
    assert part == whole
    assert len(await sums(client, "/v1/usage?group_by=user")) == 3
    assert (await admin.get("/v1/usage")).status_code == 403
    assert (await client.get(f"{ADMIN}/usage")).status_code == 403


async def test_entries(server: Live) -> None:
    """One row per attempt with user, metadata, times and request id; pages give each once."""
    rows = await used(server, "entries", 5)
    admin = await server.http()
    newest = rows[0]
    assert (newest["user"], newest["metadata"], newest["status"]) == ("u4", {"team": "x"}, "ok")
    assert newest["request_id"].startswith("req_")
    assert 0 <= newest["queue_s"] <= newest["first_token_s"] <= newest["total_s"] < 60

    seen: list[str] = []
    after = ""
    while True:
        page = (await admin.get(f"{ADMIN}/usage/entries?tenant=entries&limit=2{after}")).json()
        seen += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == [row["id"] for row in rows]
    assert error_of(await admin.get(f"{ADMIN}/usage/entries?after=nothing"))["param"] == "after"


async def test_corrections(server: Live) -> None:
    """A negative entry beside the attempt: the sums fall, requests and the attempt stay, the audit log tells why."""
    (row,) = await used(server, "corrected")
    admin = await server.http()
    body = {"attempt": row["id"], "completion_tokens": -row["completion_tokens"], "reason": "it was nonsense"}

    made = await admin.post(f"{ADMIN}/usage/corrections", json=body)

    assert made.status_code == 201, made.text
    assert made.json()["metadata"] == {"corrects": row["id"], "reason": "it was nonsense"}
    for path in ("", f"&start={(datetime.now(UTC) - timedelta(hours=1)).timestamp():.0f}"):
        (total,) = await sums(admin, f"{ADMIN}/usage?tenant=corrected{path}")
        assert (total["num_requests"], total["completion_tokens"]) == (1, 0)
        assert total["prompt_tokens"] == row["prompt_tokens"]
    entries = (await admin.get(f"{ADMIN}/usage/entries?tenant=corrected")).json()["data"]
    assert row in entries
    (entry,) = (await admin.get(f"{ADMIN}/audit?tenant=corrected&action=usage.correct")).json()["data"]
    assert (entry["target"], entry["after"]["reason"]) == (row["id"], "it was nonsense")
    for wrong in (made.json()["id"], "nothing"):
        answer = await admin.post(f"{ADMIN}/usage/corrections", json={**body, "attempt": wrong})
        assert error_of(answer)["code"] == "attempt_not_found"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
async def test_export(server: Live, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry of the month, over several pages; what a spreadsheet would take for a formula is text."""
    monkeypatch.setattr("gateway.admin.usage.EXPORT_PAGE", 2)
    tenant = f"export-{kind}"
    client = await server.http(await server.key(tenant))
    await client.post(PATH, json=chat(user="=cmd()"))
    rows = await used(server, tenant, 4, before=1)
    admin = await server.http()
    month = datetime.now(UTC).strftime("%Y-%m")

    answer = await admin.get(f"{ADMIN}/usage/export?month={month}&format={kind}&tenant={tenant}")

    text = answer.text
    found = (
        list(csv.DictReader(io.StringIO(text))) if kind == "csv" else [json.loads(line) for line in text.splitlines()]
    )
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert len(found) == 5
    assert found[-1]["user"] == ("'=cmd()" if kind == "csv" else "=cmd()")
    empty = await admin.get(f"{ADMIN}/usage/export?month=1999-12&format={kind}")
    assert len(empty.text.splitlines()) == (kind == "csv")
    for wrong in ("2026-13", "2026", "x"):
        assert (await admin.get(f"{ADMIN}/usage/export?month={wrong}")).status_code == 400


async def test_audit_filters(server: Live) -> None:
    """By tenant, actor, action, target, request and time, newest first, in pages; nothing else is shown."""
    admin = await server.http()
    await server.key("audited")
    changed = await admin.patch(f"{ADMIN}/tenants/audited", json={"weight": 3})
    await admin.patch(f"{ADMIN}/tenants/audited", json={"weight": 4})

    async def listed(query: str) -> list[dict[str, Any]]:
        return list((await admin.get(f"{ADMIN}/audit?tenant=audited&{query}")).json()["data"])

    everything = await listed("")
    assert [entry["action"] for entry in everything] == [
        "tenant.update", "tenant.update", "key.create", "tenant.create",
    ]  # fmt: skip
    newest = everything[0]
    assert (newest["before"]["weight"], newest["after"]["weight"], newest["actor"]) == (3.0, 4.0, "admin")
    assert await listed("action=tenant.update") == everything[:2]
    assert await listed(f"request_id={changed.headers['x-request-id']}") == [everything[1]]
    assert await listed("actor=nobody") == []
    assert await listed("target=audited&action=tenant.create") == [everything[3]]
    hour = 3600
    assert await listed(f"start={newest['at'] - hour}&end={newest['at'] + hour}") == everything
    assert await listed(f"end={newest['at'] - hour}") == []
    first = (await admin.get(f"{ADMIN}/audit?tenant=audited&limit=3")).json()
    rest = (await admin.get(f"{ADMIN}/audit?tenant=audited&limit=3&after={first['last_id']}")).json()
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert first["data"] + rest["data"] == everything
    tenant_key = await server.http(await server.key("audited"))
    assert (await tenant_key.get(f"{ADMIN}/audit")).status_code == 403


async def test_every_act_leaves_its_entry(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, adapters: list[Any]
) -> None:
    """Every route of administration that changes anything, done once: one entry each, with who, what, of whom, what it
    was or became, and the very request; and the same of a tenant that sees to its adapters itself."""
    source = tmp_path / "source"
    source.mkdir()
    watched = {"adapter_sources": (str(source),), "source_every_s": 3600}
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **watched) as live:
        admin, done = await live.http(), set[tuple[str, str]]()

        async def act(method: str, route: str, sent: Any = None, client: httpx.AsyncClient = admin, **at: Any) -> Any:
            content = {"files": sent} if "weights" in (sent or ()) else {"json": sent}
            answer = await client.request(method, route.format(tenant="acme", plan="gold", name="a", **at), **content)
            assert answer.is_success, (method, route, answer.text)
            done.add((method, route))
            (entry,) = (await admin.get(f"{ADMIN}/audit?request_id={answer.headers['x-request-id']}")).json()["data"]
            assert entry["actor"] == "admin" if client is admin else entry["actor"].startswith("key:")
            assert entry["action"]
            assert entry["target"]
            assert entry["before"] or entry["after"], entry
            return answer.json()

        tenant, plan, keys = (
            f"{ADMIN}/tenants/{{tenant}}",
            f"{ADMIN}/plans/{{plan}}",
            f"{ADMIN}/tenants/{{tenant}}/keys",
        )
        await act("POST", f"{ADMIN}/tenants", {"id": "acme"})
        await act("PATCH", tenant, {"weight": 2})
        await act("POST", f"{ADMIN}/plans", {"id": "gold"})
        await act("PUT", plan, {"limits": {"concurrency": 1}})
        await act("DELETE", plan)
        made = await act("POST", keys, {"name": "k", "scopes": ["inference", "adapters:write"]})
        await act("POST", f"{keys}/import", {"name": "old", "sha256": "0" * 64, "hint": "x"})
        await act("PATCH", f"{keys}/{{key_id}}", {"name": "l"}, key_id=made["id"])
        await act("POST", f"{keys}/{{key_id}}/rotate", {}, key_id=made["id"])
        own = await live.http(made["key"])
        assert (await own.post(PATH, json=chat())).status_code == 200
        ann = await act("POST", f"{ADMIN}/admin-keys", {"name": "Ann", "role": "admin"})
        await (await live.http(ann["key"])).delete(f"{ADMIN}/admin-keys/settings")
        restored = await (await live.http(ann["key"])).post(f"{ADMIN}/admin-keys/settings/restore")
        (entry,) = (await admin.get(f"{ADMIN}/audit?request_id={restored.headers['x-request-id']}")).json()["data"]
        assert (entry["actor"], restored.status_code) == ("admin:Ann", 200)
        done.add(("POST", f"{ADMIN}/admin-keys/settings/restore"))
        await act("DELETE", f"{ADMIN}/admin-keys/{{key_id}}", key_id=ann["id"])
        for client, where in ((admin, f"{tenant}/adapters"), (admin, f"{ADMIN}/adapters"), (own, "/v1/adapters")):
            one = f"{where}/{{name}}"
            first = (await act("POST", where, parts(adapters[0], "a"), client))["version"]
            second = (await act("PUT", one, parts(adapters[1]), client))["version"]
            await act("PUT", f"{one}/probes", {"probes": []}, client)
            await act("POST", f"{one}/rollback", {}, client)
            await act("POST", f"{one}/activate", {"version": second}, client)
            await act("PUT", f"{one}/aliases/{{alias}}", {"version": first}, client, alias="stable")
            await act("DELETE", f"{one}/aliases/{{alias}}", None, client, alias="stable")
            await act("DELETE", f"{one}/versions/{{version}}", None, client, version=first)
            if client is admin:
                await act("POST", f"{one}/pin")
                await act("DELETE", f"{one}/pin")
            await act("DELETE", one, None, client)
        await act("POST", f"{ADMIN}/sources/{{source}}/sync", source=source_id(str(source)))
        rows: list[Any] = []
        for _ in range(200):
            rows = (await admin.get(f"{ADMIN}/usage/entries?tenant=acme")).json()["data"]
            if rows:
                break
            await asyncio.sleep(0.05)
        await act("POST", f"{ADMIN}/usage/corrections", {"attempt": rows[0]["id"], "prompt_tokens": -1, "reason": "x"})
        await act("DELETE", f"{keys}/{{key_id}}", key_id=made["id"])
        await act("DELETE", tenant)

    changing = {
        (method, route.path) for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)
        for method in (route.methods or set()) - {"GET", "HEAD"}
        if route.path.startswith("/admin/") or route.path.startswith("/v1/adapters")
    }  # fmt: skip
    assert done == changing


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("audit?actr=admin", "actr"), ("audit?limit=0", "limit"), ("audit?after=x", "after"),
        ("audit?start=yesterday", "start"), ("audit?end=2026-01-01T00:00:00", "end"),
        ("usage?tennant=acme", "tennant"), ("usage?tenant=a/b", "tenant"), ("usage?group_by=year", "group_by"),
        ("usage/entries?limit=1001", "limit"), ("usage/entries?after=nothing", "after"),
    ],
)  # fmt: skip
async def test_a_filter_that_is_none_is_refused(server: Live, query: str, param: str) -> None:
    """A misspelt name, which would list everything, and a value that can't be are 400 with `param`."""
    admin = await server.http()
    answer = await admin.get(f"{ADMIN}/{query}")
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
