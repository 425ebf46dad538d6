"""The ledger under load, on both databases and over two workers: its totals are the sum of what the answers said."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.live import Live, serve
from tests.gateway.scripted import chat

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
NAMES = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}


def body_of(path: str, choice: random.Random) -> dict[str, Any]:
    stream = choice.random() < 0.5
    text = " ".join(choice.choices(["the", "quick", "brown", "fox"], k=choice.randint(1, 9)))
    if path == "/v1/responses":
        return {"model": "tiny", "input": text, "stream": stream, "store": False}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    n = choice.randint(1, 3)
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": [text, text], "n": n, "stream": stream, **options}
    return chat(messages=[{"role": "user", "content": text}], n=n, stream=stream, **options)


def usage_of(answer: httpx.Response) -> dict[str, int]:
    """As the answer says it: in its body, in the last chunk, or in the last event."""
    found = answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in found.splitlines() if line.startswith("data: {")]
        found = events[-1]
    value = json.loads(found)
    usage = (value.get("response") or value)["usage"]
    return {NAMES.get(name, name): number for name, number in usage.items() if isinstance(number, int)}


async def ask(live: Live, tenant: str, seed: int) -> dict[str, int]:
    """One request of many, at a random moment. → its usage."""
    choice = random.Random(seed)
    await asyncio.sleep(choice.random() / 2)
    path = choice.choice(PATHS)
    headers = {"authorization": f"Bearer {live.keys[(tenant,)]}"}
    async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=120, verify=False) as client:
        body = body_of(path, choice)
        answer = await client.post(path, json=body)
        while answer.status_code == 503:  # the machine is so busy that a store seems to be away: nothing is billed
            await asyncio.sleep(0.2)
            answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return usage_of(answer)


async def test_totals_are_the_sum_of_the_answers(
    tiny_llama: Path, tmp_path: Path, database_url: str, redis_url: str
) -> None:
    """DB-03: 120 answers of three tenants at once, plain and streaming, over two workers whose flushers and reports run
    meanwhile: one entry each, and per tenant, day and key the very sums, in the report, for the tenant itself and in
    the export."""
    async with (
        serve(tiny_llama, tmp_path / "data", database_url, redis_url) as one,
        serve(tiny_llama, tmp_path / "data", database_url, redis_url) as two,
    ):
        tenants = ("acme", "globex", "initech")
        keys = {tenant: await one.key(tenant) for tenant in tenants}
        two.keys = one.keys
        work = [(tenant, ask((one, two)[i % 2], tenant, i)) for i in range(40) for tenant in tenants]
        report = asyncio.create_task(reports(one))
        said: dict[str, Counter[str]] = {tenant: Counter() for tenant in tenants}
        for (tenant, _), usage in zip(work, await asyncio.gather(*(each for _, each in work)), strict=True):
            said[tenant].update(usage | {"num_requests": 1})
        report.cancel()
        admin = await two.http()
        rows: list[dict[str, Any]] = []
        for _ in range(200):
            rows = (await admin.get("/admin/v1/usage?group_by=tenant,day,key")).json()["data"]
            if sum(row["num_requests"] for row in rows) == len(work):
                break
            await asyncio.sleep(0.05)

        names = ("num_requests", "prompt_tokens", "completion_tokens", "total_tokens")
        found = {tenant: Counter[str]() for tenant in tenants}
        for row in rows:  # one per tenant, or two around midnight
            found[row["tenant"]].update({name: row[name] for name in names})
        assert found == {tenant: Counter({name: said[tenant][name] for name in names}) for tenant in tenants}
        month = rows[-1]["day"][:7]
        for tenant in tenants:
            own = (await (await two.http(keys[tenant])).get("/v1/usage")).json()["data"]
            assert {name: own[0][name] for name in names} == found[tenant]
            export = await admin.get(f"/admin/v1/usage/export?month={month}&tenant={tenant}")
            lines = [json.loads(line) for line in export.text.splitlines()]
            assert len({line["id"] for line in lines}) == len(lines) == found[tenant]["num_requests"]
            assert sum(line["prompt_tokens"] for line in lines) == found[tenant]["prompt_tokens"]


async def reports(live: Live) -> None:
    """Somebody looks all the time."""
    admin = await live.http()
    while True:
        assert (await admin.get("/admin/v1/usage?group_by=day,model,key")).status_code in (200, 503)
        await asyncio.sleep(0.05)
