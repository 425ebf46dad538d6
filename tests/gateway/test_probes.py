"""Probes: a version that does not answer as expected does not become current, unless it is forced."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from gateway.probes import check_probes
from tests.gateway.live import Live
from tests.gateway.test_adapters_api import ACME, OWN, SHARED, adapters, admin, error, parts

__all__ = ["adapters", "admin"]


def probe(expect: str = "ok", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Who are you?"}], "expect": expect} | fields


def lines(*probes: Any) -> dict[str, Any]:
    return {"probes": (None, "\n".join(map(json.dumps, probes)))}


async def create(
    admin: httpx.AsyncClient, files: Any, *probes: Any, query: str = "", url: str = ACME
) -> httpx.Response:
    return await admin.post(f"{url}{query}", files=parts(files, "pirate") | (lines(*probes) if probes else {}))


async def test_a_first_version_must_pass(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """422 that tells which probe failed and what it said; nothing is registered; forced it is there, and audited."""
    live.answers = ["I am a parrot"] * 2
    refused = error(await create(admin, adapters[0], probe("am a"), probe("(?i)PIRATE$")), 422)
    assert (refused["code"], refused["param"]) == ("probes_failed", "probes[1]")
    assert "1 of 2 probes failed" in refused["message"]
    assert "'(?i)PIRATE$', got 'I am a parrot'" in refused["message"]
    assert (await admin.get(ACME)).json()["data"] == []

    forced = await create(admin, adapters[0], probe("nope"), query="?force=true")
    assert (forced.status_code, forced.json()["num_probes"]) == (201, 1)
    (entry,) = [row for row in await live.audit() if row.action == "adapter.create"]
    assert entry.after is not None
    assert entry.after["forced"] is True
    assert len(live.engine.requests) == 2


async def test_activation_asks(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """The candidate itself is asked, with what it brings along, before a canary and before it is current; a failure
    changes nothing; a replacement that fails leaves no version; a rollback and the end of a canary ask nobody."""
    await create(admin, adapters[0], probe("ok"))
    defaults = {"defaults": (None, json.dumps({"system_prompt": "Be a pirate."}))}
    second = await admin.put(f"{ACME}/pirate?activate=false", files=parts(adapters[1]) | defaults)
    live.engine.requests.clear()
    for percent in (5, 100):
        live.answers = ["no"]
        refused = await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": percent})
        assert error(refused, 422)["code"] == "probes_failed"
    asked = {f"sha256:{request.adapter.digest}" for request in live.engine.requests if request.adapter}
    assert asked == {second.json()["digest"]}
    assert all("Be a pirate." in prompt for prompt in live.prompts())
    assert all(request.ephemeral and request.params.temperature == 0 for request in live.engine.requests)
    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["current_version"], shown["canary"]) == (1, None)
    live.answers = ["no"]
    assert error(await admin.put(f"{ACME}/pirate", files=parts(adapters[2])), 422)["code"] == "probes_failed"
    assert len((await admin.get(f"{ACME}/pirate")).json()["versions"]) == 2

    assert (await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 5})).status_code == 200
    live.engine.requests.clear()
    assert (await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 0})).status_code == 200
    assert (await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "force": True})).status_code == 200
    assert (await admin.post(f"{ACME}/pirate/rollback")).json()["version"] == 1
    assert live.engine.requests == []
    (last,) = [row for row in await live.audit() if row.action == "adapter.activate"][-1:]
    assert (last.before, last.after) == ({"current": 1}, {"current": 2, "forced": True})


async def test_set_apart_from_an_upload(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Probes of a name are read, replaced and taken away; an upload without any leaves them; they go with the name; the
    audit log keeps their number and no texts."""
    await create(admin, adapters[0])
    url = f"{ACME}/pirate/probes"
    assert (await admin.get(url)).json()["probes"] == []
    made = await admin.put(url, json={"probes": [probe("a"), probe("b", seconds=2, max_tokens=7)]})
    assert made.status_code == 200, made.text
    kept = (await admin.get(url)).json()["probes"]
    assert [(one["expect"], one["seconds"], one["max_tokens"]) for one in kept] == [("a", 30.0, 256), ("b", 2.0, 7)]
    await admin.put(f"{ACME}/pirate?activate=false", files=parts(adapters[1]))
    assert (await admin.get(f"{ACME}/pirate")).json()["num_probes"] == 2
    assert (await admin.put(url, json={"probes": []})).json()["probes"] == []
    await admin.put(url, json={"probes": [probe("a")]})
    await admin.delete(f"{ACME}/pirate")
    await create(admin, adapters[0])
    assert (await admin.get(url)).json()["probes"] == []
    entries = [(row.before, row.after) for row in await live.audit() if row.action == "adapter.probes"]
    assert entries == [({"probes": 0}, {"probes": 2}), ({"probes": 2}, {"probes": 0}), ({"probes": 0}, {"probes": 1})]


async def test_too_slow(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """An answer that has not ended in its seconds is a failure, and stops being generated."""
    live.engine._delay_s = 0.2
    live.answers = ["word " * 100]
    started = time.monotonic()
    refused = error(await create(admin, adapters[0], probe("word", seconds=0.5)), 422)
    assert "probes[0]: it took longer than 0.5 s" in refused["message"]
    assert time.monotonic() - started < 15
    assert all(generation.closed for generation in live.engine.generations)


async def test_a_pattern_of_a_stranger_holds_nobody_up(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any]
) -> None:
    """What takes a backtracking engine for ever is matched in linear time."""
    live.answers = ["a" * 200 + "b"]
    started = time.thread_time()
    refused = error(await create(admin, adapters[0], probe("(a+)+$")), 422)
    assert refused["code"] == "probes_failed"
    assert time.thread_time() - started < 5


async def test_no_engine_is_no_failure(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Without an engine nobody knows: 503, to be tried again, and nothing is registered."""
    live.engine.ready = None
    answer = await create(admin, adapters[0], probe())
    assert answer.status_code == 503
    assert (await admin.get(ACME)).json()["data"] == []


async def test_what_probes_use(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """It is in the ledger, as the owner's, by the key "probes"; a tenant's limits neither refuse it nor count it."""
    limits = {"requests_per_minute": 0, "tokens_per_day": 0, "concurrency": 0}
    await admin.patch("/admin/v1/tenants/acme", json={"limits": limits})
    assert (await create(admin, adapters[0], probe(), probe())).status_code == 201
    assert (await create(admin, adapters[0], probe(), url=SHARED)).status_code == 201
    rows: list[dict[str, Any]] = []
    for _ in range(100):
        rows = (await admin.get("/admin/v1/usage/entries")).json()["data"]
        if len(rows) == 3:
            break
        await asyncio.sleep(0.1)
    assert sorted(row["tenant"] for row in rows) == ["", "acme", "acme"]
    assert {(row["key"], row["endpoint"], row["status"]) for row in rows} == {("probes", "probes", "ok")}


async def test_a_tenant_asks_its_own(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AU-03: self-service has the same; another tenant's name is not there."""
    await create(admin, adapters[0])
    own = await live.http(await live.key("acme", "inference", "adapters:write"))
    stranger = await live.http(await live.key("globex", "inference", "adapters:write"))
    assert (await own.put(f"{OWN}/pirate/probes", json={"probes": [probe("x")]})).status_code == 200
    assert error(await own.post(f"{OWN}/pirate/activate", json={"version": 1}), 422)["code"] == "probes_failed"
    for answer in (await stranger.get(f"{OWN}/pirate/probes"),
                   await stranger.put(f"{OWN}/pirate/probes", json={"probes": []})):  # fmt: skip
        assert error(answer, 404)["code"] == "adapter_not_found"


REFUSED = [
    ({"expect": "x"}, "probes[0].messages"), (probe(""), "probes[0].expect"), (probe("("), "probes[0].expect"),
    (probe(r"(a)\1"), "probes[0].expect"), (probe("((a{1,1000}){1,1000}){1,1000}"), "probes[0].expect"),
    (probe(seconds=0), "probes[0].seconds"), (probe(seconds=1e9), "probes[0].seconds"),
    (probe(max_tokens=True), "probes[0].max_tokens"), (probe(regex="x"), "probes[0].regex"), ([], "probes[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "param"), REFUSED)
async def test_refused_by_line_and_field(admin: httpx.AsyncClient, adapters: list[Any], bad: Any, param: str) -> None:
    """422 probes_invalid at both doors; nothing is kept."""
    refused = error(await create(admin, adapters[0], bad), 422)
    assert (refused["code"], refused["param"]) == ("probes_invalid", param)
    await create(admin, adapters[0])
    again = error(await admin.put(f"{ACME}/pirate/probes", json={"probes": [bad]}), 422)
    assert (again["code"], again["param"]) == ("probes_invalid", param)


async def test_no_json(admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Lines that are no JSON, and too many of them."""
    body = parts(adapters[0], "pirate")
    assert error(await admin.post(ACME, files=body | {"probes": (None, "{")}), 422)["param"] == "probes"
    assert error(await create(admin, adapters[0], *[probe()] * 51), 422)["param"] == "probes"
    assert len(check_probes([probe()] * 50)) == 50
