"""How many adapters a tenant may keep, and how many bytes: refused at the door, and exactly when many come at once."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.upload import MAX_REST_BYTES
from tests.gateway.live import ADMIN_KEY, Live, serve
from tests.gateway.test_adapters_api import ACME, SHARED, adapters, admin, error, parts, upload

__all__ = ["adapters", "admin"]
TENANT = "/admin/v1/tenants/acme"


async def limit(admin: httpx.AsyncClient, **limits: int | None) -> None:
    answer = await admin.patch(TENANT, json={"adapter_limits": limits})
    assert answer.json()["adapter_limits"] == limits, answer.text


def numbers(message: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"(?:Limit|Used|Requested) (\d+)", message)))


async def test_so_many_names(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """0 = nothing, null = unlimited; versions are no further adapters; deletion makes room; others don't count."""
    await limit(admin, count=0)
    refused = error(await upload(admin, adapters[0]), 403)
    assert (refused["code"], refused["type"]) == ("adapter_quota_exceeded", "insufficient_quota")
    assert numbers(refused["message"]) == (0, 0, 1)
    await limit(admin, count=1)
    assert (await upload(admin, adapters[0])).status_code == 201
    assert (await admin.put(f"{ACME}/pirate", files=parts(adapters[1]))).status_code == 200
    assert numbers(error(await upload(admin, adapters[2], "second"), 403)["message"]) == (1, 1, 1)
    assert (await upload(admin, adapters[2], "second", SHARED)).status_code == 201
    assert (await upload(admin, adapters[2], "x", "/admin/v1/tenants/globex/adapters")).status_code == 201
    assert (await admin.get(ACME)).json()["quota"]["adapters"] == {"limit": 1, "used": 1}
    await admin.delete(f"{ACME}/pirate")
    assert (await upload(admin, adapters[2], "second")).status_code == 201
    await limit(admin, count=None)
    assert (await upload(admin, adapters[3], "third")).status_code == 201
    assert [path async for path in stages(live)] == []


async def stages(live: Live) -> Any:
    for path in await asyncio.to_thread(lambda: list((live.settings.store_dir / "stage").iterdir())):
        yield path


async def test_so_many_bytes(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Each file once, however many versions of the tenant have it; a version that goes gives its bytes back."""
    sizes = [(await upload(admin, files, f"size-{i}", SHARED)).json()["size_bytes"] for i, files in enumerate(adapters)]
    await limit(admin, bytes=sizes[0] + sizes[1])
    await upload(admin, adapters[0])
    await admin.put(f"{ACME}/pirate", files=parts(adapters[1]))
    for name in ("twin", "again"):
        assert (await upload(admin, adapters[0], name)).status_code == 201
    full = sizes[0] + sizes[1]
    assert (await admin.get(ACME)).json()["quota"]["bytes"] == {"limit": full, "used": full}
    refused = error(await admin.put(f"{ACME}/pirate", files=parts(adapters[2])), 403)
    assert numbers(refused["message"]) == (full, full, sizes[2])
    assert (await admin.get(f"{ACME}/pirate")).json()["current_version"] == 2
    for name in ("twin", "again"):
        await admin.delete(f"{ACME}/{name}")
    await admin.delete(f"{ACME}/pirate/versions/1")
    assert (await admin.get(ACME)).json()["quota"]["bytes"]["used"] == sizes[1]
    assert (await upload(admin, adapters[0], "back")).status_code == 201


async def test_refused_before_the_body_is_read(live: Live, admin: httpx.AsyncClient) -> None:
    """Content-Length alone refuses what can't have room: the body never comes."""
    await limit(admin, bytes=1 << 20)
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {ACME} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n"
        f"content-type: multipart/form-data; boundary=xyz\r\ncontent-length: {MAX_REST_BYTES + (2 << 20)}\r\n\r\n"
    )
    writer.write(head.encode())
    await writer.drain()
    async with asyncio.timeout(10):
        answer = await reader.read(4096)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403")
    assert numbers(answer.decode()) == (1 << 20, 0, 2 << 20)


async def test_many_at_once_never_exceed(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Of ten parallel uploads to a tenant with room for three exactly three are there."""
    await limit(admin, count=3)
    answers = await asyncio.gather(*(upload(admin, files, f"a{i}") for i, files in enumerate(adapters)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [403] * 7
    assert len((await admin.get(ACME)).json()["data"]) == 3


async def test_the_tenant_before_its_plan_before_the_settings(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, adapters: list[Any]
) -> None:
    """What is not named the next one decides; null is a word too."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, max_adapters_per_tenant=1) as live:
        admin = await live.http()
        await admin.post("/admin/v1/plans", json={"id": "gold", "adapter_limits": {"count": 2}})
        await admin.post("/admin/v1/plans", json={"id": "free", "adapter_limits": {"bytes": 0}})
        await admin.post("/admin/v1/tenants", json={"id": "acme"})

        async def quota() -> tuple[int | None, int | None]:
            found = (await admin.get(ACME)).json()["quota"]
            return found["adapters"]["limit"], found["bytes"]["limit"]

        assert await quota() == (1, None)
        for change, expected in (
            ({"plan": "gold"}, (2, None)), ({"adapter_limits": {"count": None}}, (None, None)),
            ({"adapter_limits": {"bytes": 7}}, (2, 7)), ({"plan": "free"}, (1, 7)), ({"adapter_limits": {}}, (1, 0)),
        ):  # fmt: skip
            await admin.patch(TENANT, json=change)
            assert await quota() == expected
        assert error(await upload(admin, adapters[0]), 403)["code"] == "adapter_quota_exceeded"


@pytest.mark.parametrize("limits", [{"count": -1}, {"count": "1"}, {"count": True}, {"bytes": 1.5}, {"names": 1}, None])
async def test_limits_that_can_not_be(admin: httpx.AsyncClient, limits: Any) -> None:
    """Refused by name, for tenants and plans."""
    for answer in (await admin.patch(TENANT, json={"adapter_limits": limits}),
                   await admin.post("/admin/v1/plans", json={"id": "p", "adapter_limits": limits})):  # fmt: skip
        assert error(answer, 400)["param"].startswith("adapter_limits")
