"""Which version answers: aliases, canaries, rollback, other base models; over HTTP, with a fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from adapters.rows import VersionRow
from tenants.db import Database
from tests.gateway.live import Live
from tests.gateway.scripted import chat, error_of
from tests.gateway.test_adapters_api import ACME, OWN, adapters, admin, error, parts, upload

__all__ = ["adapters", "admin"]
CHAT = "/v1/chat/completions"


async def three_versions(admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """pirate: rank 2, 3 and 4 as versions 1 (current), 2, 3."""
    await upload(admin, adapters[0])
    for files in adapters[1:3]:
        await admin.put(f"{ACME}/pirate?activate=false", files=parts(files))


async def version_of(client: httpx.AsyncClient, model: str = "pirate", **fields: Any) -> int:
    answer = await client.post(CHAT, json=chat(**fields) | {"model": model})
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-adapter-version"])


async def test_an_alias_stands_for_a_version(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """It is made, moved only by who knows where it is, listed, called, and gone at once, for every surface; the audit
    log tells it."""
    await three_versions(admin, adapters)
    caller = await live.http(await live.key("acme"))
    url = f"{ACME}/pirate/aliases/stable"

    made = await admin.put(url, json={"version": 2, "if_current": 0})
    assert (made.status_code, made.json()) == (201, {"object": "adapter.alias", "id": "pirate:stable", "version": 2})
    assert await version_of(caller, "pirate:stable") == 2
    assert await version_of(caller) == 1
    listed = [model["id"] for model in (await caller.get("/v1/models")).json()["data"]]
    assert listed == ["tiny", "pirate", "pirate:stable"]
    assert (await caller.get("/v1/models/pirate:stable")).json()["version"] == 2
    assert (await admin.get(f"{ACME}/pirate")).json()["aliases"] == {"stable": 2}

    assert error(await admin.put(url, json={"version": 3, "if_current": 1}), 409)["param"] == "if_current"
    assert error(await admin.put(url, json={"version": 3, "if_current": 0}), 409)["code"] == "conflict"
    assert (await admin.put(url, json={"version": 3, "if_current": 2})).status_code == 200
    assert await version_of(caller, "pirate:stable") == 3
    assert (await admin.get(f"{ACME}/pirate/aliases")).json()["data"] == [
        {"object": "adapter.alias", "id": "pirate:stable", "version": 3}
    ]
    assert (await admin.delete(url)).json() == {
        "object": "adapter.alias.deleted", "id": "pirate:stable", "deleted": True,
    }  # fmt: skip
    for answer in (await caller.post(CHAT, json=chat() | {"model": "pirate:stable"}),
                   await caller.post("/v1/responses", json={"input": "x", "model": "pirate:stable"})):  # fmt: skip
        assert error_of(answer)["code"] == "model_not_found"
    assert error(await admin.delete(url), 404)["code"] == "alias_not_found"
    acts = [(row.action, row.target, row.before, row.after) for row in await live.audit() if "alias" in row.action]
    assert acts == [
        ("adapter.alias", "pirate:stable", None, {"version": 2}),
        ("adapter.alias", "pirate:stable", {"version": 2}, {"version": 3}),
        ("adapter.unalias", "pirate:stable", {"version": 3}, None),
    ]


async def test_aliases_that_can_not_be(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """HS-14: one plain pattern; words that would move by themselves are reserved; no alias without its version."""
    await upload(admin, adapters[0])
    for alias in ("latest", "current", "previous", "canary", "Stable", "1", "-a", "a b", "é", "x" * 33):
        refused = error(await admin.put(f"{ACME}/pirate/aliases/{alias}", json={"version": 1}), 400)
        assert refused["param"] == "alias", alias
        assert refused["code"] in ("name_invalid", "name_reserved")
    assert error(await admin.put(f"{ACME}/pirate/aliases/ok", json={"version": 9}), 404)["code"] == "adapter_not_found"
    assert error(await admin.put(f"{ACME}/nobody/aliases/ok", json={"version": 1}), 404)["code"] == "adapter_not_found"
    assert error(await admin.put(f"{ACME}/pirate/aliases/ok", json={"version": "1"}), 400)["param"] == "version"
    assert (await admin.get(f"{ACME}/pirate")).json()["aliases"] == {}


async def test_an_alias_is_no_way_around(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AU-03, HS-03: an unknown alias, another tenant's and one of a name that is not allowed are the same 404; an
    allowed name's alias is allowed; nothing is generated."""
    await three_versions(admin, adapters)
    await admin.put(f"{ACME}/pirate/aliases/stable", json={"version": 2})
    stranger = await live.http(await live.key("globex"))
    caller = await live.http(await live.key("acme"))
    said = set()
    for client, name in ((stranger, "pirate:stable"), (stranger, "pirate:nope"), (caller, "pirate:nope"),
                         (caller, "pirate:stable@2"), (caller, "pirate@2:stable"), (caller, "tiny:stable"),
                         (caller, "pirate:"), (caller, "pirate:latest"), (caller, "pirate:STABLE")):  # fmt: skip
        answer = await client.post(CHAT, json=chat() | {"model": name})
        assert error_of(answer)["code"] == "model_not_found", name
        said.add(answer.text.replace(name, "X"))
    assert len(said) == 1
    assert live.engine.requests == []

    await admin.patch("/admin/v1/tenants/acme", json={"models": ["other"]})
    assert (await caller.post(CHAT, json=chat() | {"model": "pirate:stable"})).status_code == 404
    await admin.patch("/admin/v1/tenants/acme", json={"models": ["pirate"]})
    assert await version_of(caller, "pirate:stable") == 2


async def test_rollback_goes_back(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """One call makes the version current that was before; again, the one before that; at the first there is nothing;
    what is activated afterwards has the last good one behind it; a lost compare-and-swap changes nothing."""
    await three_versions(admin, adapters)
    caller = await live.http(await live.key("acme"))
    url = f"{ACME}/pirate"
    assert error(await admin.post(f"{url}/rollback"), 409)["code"] == "no_earlier_version"
    for version in (2, 3, 3):
        await admin.post(f"{url}/activate", json={"version": version})
    assert (await admin.get(url)).json()["previous_version"] == 2

    lost = await admin.post(f"{url}/rollback", json={"if_current": 1})
    assert (error(lost, 409)["param"], lost.headers["x-should-retry"]) == ("if_current", "false")
    back = (await admin.post(f"{url}/rollback", json={"if_current": 3})).json()
    assert (back["version"], back["current_version"], back["previous_version"]) == (2, 2, 1)
    assert await version_of(caller) == 2
    assert (await admin.post(f"{url}/rollback")).json()["version"] == 1
    assert error(await admin.post(f"{url}/rollback"), 409)["code"] == "no_earlier_version"
    await admin.post(f"{url}/activate", json={"version": 3})
    assert (await admin.post(f"{url}/rollback")).json()["version"] == 1
    rows = [row for row in await live.audit() if row.action == "adapter.rollback"]
    assert [(row.before, row.after) for row in rows] == [
        ({"current": 3}, {"current": 2}), ({"current": 2}, {"current": 1}), ({"current": 3}, {"current": 1}),
    ]  # fmt: skip


async def test_many_rollbacks_at_once_go_one_step(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Of parallel rollbacks that believe in the same version exactly one acts."""
    await three_versions(admin, adapters)
    for version in (2, 3):
        await admin.post(f"{ACME}/pirate/activate", json={"version": version})
    answers = await asyncio.gather(*(admin.post(f"{ACME}/pirate/rollback", json={"if_current": 3}) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    assert (await admin.get(f"{ACME}/pirate")).json()["current_version"] == 2


async def test_a_canary_answers_its_share(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """About so many of a hundred users, always the same ones, all choices and turns of a request by one version; more
    percent keep who is there; @version and aliases stay what they are; usage is told per version."""
    await three_versions(admin, adapters)
    caller = await live.http(await live.key("acme"))
    started = await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 30, "if_current": 1})
    assert started.json()["canary"] == {"version": 2, "percent": 30}
    assert started.json()["current_version"] == 1

    async def split() -> dict[str, int]:
        users = [f"user-{i}" for i in range(100)]
        return {user: await version_of(caller, user=user) for user in users}

    first = await split()
    assert first == await split()
    assert set(first.values()) == {1, 2}
    assert 15 <= sum(version == 2 for version in first.values()) <= 45
    await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 60})
    wider = await split()
    assert {user for user, version in first.items() if version == 2} < {u for u, v in wider.items() if v == 2}
    assert {await version_of(caller, "pirate@1", user=user) for user in wider} == {1}
    live.engine.requests.clear()
    answer = await caller.post(CHAT, json=chat(user="user-1", n=8) | {"model": "pirate"})
    assert len(answer.json()["choices"]) == 8
    assert len({request.adapter.digest for request in live.engine.requests if request.adapter}) == 1

    both = [*first.values(), *first.values(), *wider.values(), int(answer.headers["x-adapter-version"])]
    counted: dict[str, int] = {}
    async with asyncio.timeout(30):
        while sum(counted.values()) < len(both):
            await asyncio.sleep(0.1)  # the flusher writes the ledger
            usage = (await admin.get("/admin/v1/usage?tenant=acme&group_by=model,version")).json()["data"]
            counted = {row["version"]: row["num_requests"] for row in usage if row["model"] == "pirate"}
    assert counted == {"1": both.count(1), "2": both.count(2)}


async def test_conversations_stay_with_their_version(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """The turns of a chat, of a chain of responses and of a conversation are answered by one version each; chats that
    open otherwise spread."""
    await three_versions(admin, adapters)
    await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 50})
    caller = await live.http(await live.key("acme"))
    seen = {"chat": set(), "chain": set(), "conversation": set()}  # type: dict[str, set[int]]
    for i in range(12):
        said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": f"question {i}"}]
        versions = set()
        for _ in range(3):
            versions.add(await version_of(caller, messages=list(said)))
            said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        assert len(versions) == 1
        seen["chat"] |= versions

        previous, versions = None, set()
        conversation = (await caller.post("/v1/conversations", json={})).json()["id"]
        for _ in range(3):
            body = {"model": "pirate", "input": "hi", "previous_response_id": previous}
            answer = await caller.post("/v1/responses", json=body)
            previous = answer.json()["id"]
            versions.add(int(answer.headers["x-adapter-version"]))
        assert len(versions) == 1
        seen["chain"] |= versions
        versions = set()
        for _ in range(2):
            body = {"model": "pirate", "input": "hi", "conversation": conversation}
            versions.add(int((await caller.post("/v1/responses", json=body)).headers["x-adapter-version"]))
        assert len(versions) == 1
        seen["conversation"] |= versions
    assert seen == {"chat": {1, 2}, "chain": {1, 2}, "conversation": {1, 2}}


async def test_a_canary_ends(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """By promotion, by 0 percent, by rollback (the current one stays), by another activation or replacement; each only
    if the caller knows what is."""
    await three_versions(admin, adapters)
    url = f"{ACME}/pirate"

    async def state() -> tuple[int, Any]:
        body = (await admin.get(url)).json()
        return body["current_version"], body["canary"] and body["canary"]["version"]

    async def act(**body: Any) -> httpx.Response:
        return await admin.post(f"{url}/activate", json=body)

    for body, param in (({"version": 1, "percent": 10}, "percent"), ({"version": 2, "percent": 0}, "version"),
                        ({"version": 2, "percent": 5, "if_canary": 3}, "if_canary")):  # fmt: skip
        assert error(await act(**body), 409)["param"] == param
    for percent in (-1, 101, 2.5, "10", None):
        assert error(await act(version=2, percent=percent), 400)["param"] == "percent"
    await act(version=2, percent=10, if_canary=0)
    assert await state() == (1, 2)
    await act(version=2, percent=0, if_canary=2)
    assert await state() == (1, None)
    await act(version=2, percent=10)
    assert (await admin.post(f"{url}/rollback")).json()["current_version"] == 1
    assert await state() == (1, None)
    await act(version=2, percent=10)
    await act(version=2, percent=100, if_current=1, if_canary=2)
    assert await state() == (2, None)
    await act(version=3, percent=10)
    await admin.put(url, files=parts(adapters[3]))
    assert await state() == (4, None)


async def test_versions_that_nobody_needs_can_go(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Not the current one, nor a canary, nor what an alias stands for; the rest is 404 at once, leaves the engine, and
    a rollback passes over it."""
    await three_versions(admin, adapters)
    url = f"{ACME}/pirate"
    for version in (2, 3, 1):
        await admin.post(f"{url}/activate", json={"version": version})
    await admin.put(f"{url}/aliases/stable", json={"version": 2})
    await admin.post(f"{url}/activate", json={"version": 3, "percent": 10})
    for version in (1, 2, 3):
        assert error(await admin.delete(f"{url}/versions/{version}"), 409)["code"] == "version_in_use"
    await admin.post(f"{url}/activate", json={"version": 3, "percent": 0})

    gone = await admin.delete(f"{url}/versions/3")
    assert gone.json() == {"object": "adapter.version.deleted", "id": "pirate@3", "deleted": True}
    assert error(await admin.delete(f"{url}/versions/3"), 404)["code"] == "adapter_not_found"
    caller = await live.http(await live.key("acme"))
    assert (await caller.post(CHAT, json=chat() | {"model": "pirate@3"})).status_code == 404
    assert (await admin.post(f"{url}/rollback")).json()["version"] == 2
    for _ in range(3000):
        if live.engine.evicted:
            break
        await asyncio.sleep(0.01)
    assert len(live.engine.evicted) == 1


async def test_another_base_model(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AL-23: a version that was validated for another base model shows as failed with its reason, is 409 base_mismatch
    where it is used or made current, and is never served; an upload for this base takes its place."""
    await three_versions(admin, adapters)
    await admin.put(f"{ACME}/pirate/aliases/stable", json={"version": 1})
    database = Database(live.settings.database_url)
    async with database.begin() as session:
        await session.execute(update(VersionRow).where(VersionRow.version == 1).values(base_fingerprint="0" * 64))
    await database.close()
    caller = await live.http(await live.key("acme"))

    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["status"], shown["reason_code"]) == ("failed", "base_mismatch")
    assert [version["status"] for version in shown["versions"]] == ["failed", "ready", "ready"]
    for name in ("pirate", "pirate@1", "pirate:stable"):
        refused = await caller.post(CHAT, json=chat() | {"model": name})
        assert refused.status_code == 409
        assert (error_of(refused)["code"], refused.headers["x-should-retry"]) == ("base_mismatch", "false")
    assert [model["id"] for model in (await caller.get("/v1/models")).json()["data"]] == ["tiny"]
    assert live.engine.requests == []
    assert await version_of(caller, "pirate@2") == 2
    assert (await admin.post(f"{ACME}/pirate/activate", json={"version": 2})).status_code == 200
    for act in (("activate", {"version": 1}), ("activate", {"version": 1, "percent": 5}), ("rollback", {})):
        assert error(await admin.post(f"{ACME}/pirate/{act[0]}", json=act[1]), 409)["code"] == "base_mismatch"
    assert await version_of(caller) == 2


async def test_another_base_name_is_a_warning(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AL-23: adapter_config.json's own word about its base decides nothing where the shapes fit."""
    config = json.loads(adapters[0][0]) | {"base_model_name_or_path": "org/other"}
    made = await upload(admin, (json.dumps(config).encode(), adapters[0][1]))
    assert made.status_code == 201
    assert any("org/other" in warning for warning in made.json()["warnings"])


async def test_self_service(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AU-02, AU-03: a tenant's own key may do all of it for its own; without the scope it is 403, for another's 404."""
    await three_versions(admin, adapters)
    own = await live.http(await live.key("acme", "inference", "adapters:write"))
    acts: list[tuple[str, str, Any]] = [
        ("POST", "activate", {"version": 2}), ("POST", "rollback", None), ("PUT", "aliases/stable", {"version": 3}),
        ("GET", "aliases", None), ("DELETE", "aliases/stable", None), ("DELETE", "versions/3", None),
    ]  # fmt: skip
    stranger = await live.http(await live.key("globex", "inference", "adapters:write"))
    reader = await live.http(await live.key("acme"))
    for method, path, body in acts:
        assert (await reader.request(method, f"{OWN}/pirate/{path}", json=body)).status_code == 403
        assert error(await stranger.request(method, f"{OWN}/pirate/{path}", json=body), 404)
        assert (await own.request(method, f"{OWN}/pirate/{path}", json=body)).status_code in (200, 201), path


@pytest.mark.parametrize("name", ["a" * 64 + ":" + "b" * 32])
async def test_the_longest_names(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any], name: str, tmp_path: Path
) -> None:
    """The longest name with the longest alias can be called."""
    adapter, alias = name.split(":")
    await upload(admin, adapters[0], adapter)
    await admin.put(f"{ACME}/{adapter}/aliases/{alias}", json={"version": 1})
    caller = await live.http(await live.key("acme"))
    assert await version_of(caller, name) == 1


async def test_all_of_it_is_applied(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AL-03: the status tells how many tensors of the file are applied, with rank, scale, bytes and warnings."""
    await upload(admin, adapters[0])
    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["applied"], shown["num_modules"], shown["num_tensors"]) == ("4/4", 2, 4)
    assert (shown["rank"], shown["warnings"], len(shown["scales"])) == (2, [], 1)
