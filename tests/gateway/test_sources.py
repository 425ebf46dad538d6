"""Watched sources: what lies in them is served like an upload, what is wrong is told of once, what goes is retired."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.bucket import Bucket, BucketConfig
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from tests.gateway.live import Live, serve
from tests.gateway.test_admin import error
from tests.tiny import tiny_adapter

EVERY_S = 0.1
ACME = "/admin/v1/tenants/acme/adapters"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "acme").mkdir(parents=True)
    return tmp_path / "source"


@pytest.fixture
async def live(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, source: Path) -> AsyncIterator[Live]:
    """A gateway that watches `source`; the tenants acme and globex."""
    watched = {"adapter_sources": (str(source),), "source_every_s": EVERY_S}
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **watched) as running:
        for tenant in ("acme", "globex"):
            await (await running.http()).post("/admin/v1/tenants", json={"id": tenant})
        yield running


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> list[Path]:
    """Good adapters of rank 2, 3, 4."""
    root = tmp_path_factory.mktemp("made")
    return [tiny_adapter(root / str(i), tiny_llama, seed=i, rank=2 + i, targets=("q_proj",)) for i in range(3)]


def lay(made: Path, place: Path) -> None:
    """As a careful person puts an adapter there: beside, then renamed."""
    beside = place.with_name(f".{place.name}")
    beside.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(made, beside)
    if place.exists():
        shutil.rmtree(place)
    beside.rename(place)


async def until(ask: Callable[[], Awaitable[Any]], timeout_s: float = 30.0) -> Any:
    """What `ask` answers, once it is true."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await ask()):  # noqa: ASYNC110 — the gateway tells nobody
            await asyncio.sleep(EVERY_S / 2)
    return answer


async def looks(admin: httpx.AsyncClient, count: int) -> None:
    """Returns after so many more looks at the source."""

    def number(text: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith("chorus_source_looks_total")]
        return sum(float(line.split()[-1]) for line in lines)

    wanted = number((await admin.get("/metrics")).text) + count

    async def done() -> bool:
        return number((await admin.get("/metrics")).text) >= wanted

    await until(done)


async def source_of(admin: httpx.AsyncClient) -> dict[str, Any]:
    (found,) = (await admin.get("/admin/v1/sources")).json()["data"]
    return dict(found)


async def entries(admin: httpx.AsyncClient, **query: str) -> dict[str, dict[str, Any]]:
    path = f"/admin/v1/sources/{(await source_of(admin))['id']}/adapters"
    return {entry["id"]: entry for entry in (await admin.get(path, params=query)).json()["data"]}


async def settled(admin: httpx.AsyncClient, key: str, **wanted: Any) -> dict[str, Any]:
    """The entry of an adapter, once it says what is wanted."""

    async def ask() -> dict[str, Any] | None:
        entry = (await entries(admin)).get(key, {})
        return entry if entry and all(entry[name] == value for name, value in wanted.items()) else None

    found: dict[str, Any] = await until(ask)
    return found


async def test_what_lies_there_is_served(live: Live, source: Path, made: list[Path]) -> None:
    """A new directory is an adapter of its tenant soon, and one in _shared everybody's: checked, warmed, audited as the
    source's act, told of in the status; another version when it changes, none when it does not."""
    admin = await live.http()
    lay(made[0], source / "acme" / "pirate")
    lay(made[1], source / "_shared" / "all")
    first = await settled(admin, "acme/pirate", status="ready")
    await settled(admin, "_shared/all", status="ready")

    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["digest"], shown["version"], shown["rank"]) == (first["digest"], 1, 2)
    caller = await live.openai(await live.key("globex"))
    assert {"all"} == {model.id for model in (await caller.models.list()).data} - {"tiny"}
    lay(made[2], source / "acme" / "pirate")
    second = await settled(admin, "acme/pirate", digest=await digest_after(admin, first["digest"]))
    (source / "acme" / "pirate" / CONFIG_FILE).touch()
    await looks(admin, 4)
    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["version"], shown["rank"], second["digest"] != first["digest"]) == (2, 4, True)
    acts = [(entry.action, entry.tenant_id) for entry in await live.audit() if entry.actor == "source"]
    assert sorted(acts) == [("adapter.create", ""), ("adapter.create", "acme"), ("adapter.replace", "acme")]
    assert f"sha256:{live.engine.warmed[-1].digest}" == second["digest"]
    found = await source_of(admin)
    assert (found["status"], found["ready"], found["failed"], found["error"]) == ("ok", 2, 0, None)
    assert 'chorus_source_adapters_total{outcome="taken"} 4.0' in (await admin.get("/metrics")).text


async def digest_after(admin: httpx.AsyncClient, digest: str) -> str:
    async def ask() -> str | None:
        now = (await entries(admin))["acme/pirate"]["digest"]
        return str(now) if now != digest else None

    return str(await until(ask))


async def test_what_is_wrong_is_told_once(
    live: Live, source: Path, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A broken adapter is refused with the code that an upload would get, logged and counted once however often it is
    looked at; what was served before goes on; mended, it is ready."""
    admin = await live.http()
    lay(made[0], source / "acme" / "pirate")
    lay(made[0], source / "acme" / "fresh")
    before = await settled(admin, "acme/pirate", status="ready")
    with caplog.at_level(logging.WARNING):
        for name in ("pirate", "fresh"):
            weights = source / "acme" / name / WEIGHTS_FILE
            await settled(admin, f"acme/{name}", status="ready")
            weights.write_bytes(weights.read_bytes()[:-1])
        bad = await settled(admin, "acme/pirate", status="failed")
        await settled(admin, "acme/fresh", status="failed")
        await looks(admin, 4)

    assert (bad["code"], bad["digest"]) == ("weights_truncated", before["digest"])
    assert "the file has only" in bad["message"]
    told = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert len(told) == 2
    assert 'chorus_source_adapters_total{outcome="failed"} 2.0' in (await admin.get("/metrics")).text
    assert set(await entries(admin, status="failed")) == {"acme/pirate", "acme/fresh"}
    assert await entries(admin, status="ready") == {}
    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert (shown["status"], shown["digest"]) == ("ready", before["digest"])
    lay(made[1], source / "acme" / "pirate")
    mended = await settled(admin, "acme/pirate", status="ready")
    assert (mended["code"], mended["message"]) == (None, None)
    assert (await admin.get(f"{ACME}/pirate")).json()["rank"] == 3


async def test_what_goes_is_retired(live: Live, source: Path, made: list[Path]) -> None:
    """A directory that is gone takes its adapter along, and the engines are told. A source with nothing in it at all,
    or one that is away, retires nothing and says so."""
    admin = await live.http()
    lay(made[0], source / "acme" / "pirate")
    lay(made[1], source / "acme" / "other")
    gone = await settled(admin, "acme/pirate", status="ready")
    await settled(admin, "acme/other", status="ready")

    shutil.rmtree(source / "acme" / "pirate")

    async def is_gone() -> bool:
        return set(await entries(admin)) == {"acme/other"}

    await until(is_gone)
    assert error(await admin.get(f"{ACME}/pirate"), 404)
    assert f"sha256:{live.engine.evicted[-1]}" == gone["digest"]
    assert [entry.actor for entry in await live.audit() if entry.action == "adapter.delete"] == ["source"]
    for away in (source / "acme", source):
        away.rename(source.with_name("elsewhere"))
        await looks(admin, 4)
        found = await source_of(admin)
        assert (found["status"], found["ready"]) == ("failed", 1)
        assert found["error"]
        assert (await admin.get(f"{ACME}/other")).status_code == 200
        source.with_name("elsewhere").rename(away)
    await looks(admin, 3)
    assert (await source_of(admin))["status"] == "ok"


async def test_a_copy_under_way_is_left_alone(live: Live, source: Path, made: list[Path]) -> None:
    """While files grow or are still missing nothing is taken or refused; when they stand still, it is."""
    admin = await live.http()
    place = source / "acme" / "slow"
    place.mkdir()
    data = (made[0] / WEIGHTS_FILE).read_bytes()
    shutil.copy(made[0] / CONFIG_FILE, place / CONFIG_FILE)
    may_end = threading.Event()

    def copy() -> None:
        with (place / WEIGHTS_FILE).open("wb", buffering=0) as file:
            for index in range(len(data)):
                if may_end.is_set():
                    file.write(data[index:])
                    return
                file.write(data[index : index + 1])
                time.sleep(EVERY_S / 10)

    copying = asyncio.create_task(asyncio.to_thread(copy))
    try:
        for _ in range(8):
            await looks(admin, 1)
            assert await entries(admin) == {}
    finally:
        may_end.set()
        await copying

    assert (await settled(admin, "acme/slow", status="ready"))["code"] is None


async def test_names_and_tenants_are_respected(live: Live, source: Path, made: list[Path]) -> None:
    """A name that an upload took stays the upload's; a tenant that is not there, a name that none can have, and the
    base's name are refusals; a tenant that comes later, and whose quota was full at first, gets its adapter without any
    change of the files."""
    admin = await live.http()
    files = {"config": (made[0] / CONFIG_FILE).read_bytes(), "weights": (made[0] / WEIGHTS_FILE).read_bytes()}
    uploaded = await admin.post(ACME, files=files | {"name": (None, b"mine")})
    assert uploaded.status_code == 201
    for tenant, name in (("acme", "mine"), ("nobody", "x"), ("acme", "wörd"), ("acme", "tiny"), ("..x", "y")):
        lay(made[1], source / tenant / name)

    codes = {"acme/mine": "adapter_exists", "nobody/x": "tenant_not_found", "acme/wörd": "name_invalid",
             "acme/tiny": "name_reserved"}  # fmt: skip
    for key, code in codes.items():
        await settled(admin, key, status="failed", code=code)
    assert set(await entries(admin)) == set(codes)
    assert (await admin.get(f"{ACME}/mine")).json()["digest"] == uploaded.json()["digest"]
    full = {"id": "nobody", "adapter_limits": {"count": 0}}
    assert (await admin.post("/admin/v1/tenants", json=full)).status_code == 201
    await settled(admin, "nobody/x", status="failed", code="adapter_quota_exceeded")
    assert (await admin.patch("/admin/v1/tenants/nobody", json={"adapter_limits": {"count": 1}})).status_code == 200
    await settled(admin, "nobody/x", status="ready")
    shutil.rmtree(source / "acme" / "mine")
    await looks(admin, 4)
    assert (await admin.get(f"{ACME}/mine")).json()["digest"] == uploaded.json()["digest"]


async def test_what_an_admin_does_over_it_stays(live: Live, source: Path, made: list[Path]) -> None:
    """Deleting over HTTP, or another version by upload, is not undone by the next look; a change in the source counts
    again; what is gone from the source takes only its own along."""
    admin = await live.http()
    lay(made[0], source / "acme" / "pirate")
    lay(made[0], source / "acme" / "other")
    for name in ("pirate", "other"):
        await settled(admin, f"acme/{name}", status="ready")
    await admin.delete(f"{ACME}/pirate")
    files = {"config": (made[1] / CONFIG_FILE).read_bytes(), "weights": (made[1] / WEIGHTS_FILE).read_bytes()}
    await admin.delete(f"{ACME}/other")
    assert (await admin.post(ACME, files=files | {"name": (None, b"other")})).status_code == 201

    await looks(admin, 4)
    assert error(await admin.get(f"{ACME}/pirate"), 404)
    assert (await admin.get(f"{ACME}/other")).json()["rank"] == 3
    lay(made[2], source / "acme" / "pirate")

    async def is_back() -> bool:
        return (await admin.get(f"{ACME}/pirate")).status_code == 200

    await until(is_back)
    shutil.rmtree(source / "acme" / "other")
    await looks(admin, 4)
    assert (await admin.get(f"{ACME}/other")).json()["rank"] == 3
    assert set(await entries(admin)) == {"acme/pirate"}


async def test_one_gateway_at_a_time(
    live: Live, source: Path, made: list[Path], tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str
) -> None:
    """Of two gateways that watch one source each adapter gets one version; when the one that syncs ends, the other goes
    on; and a restart takes nothing twice and retires nothing."""
    watched = {"adapter_sources": (str(source),), "source_every_s": EVERY_S}
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **watched) as other:
        admin = await other.http()
        for number in range(3):
            lay(made[number], source / "acme" / f"a{number}")
        for number in range(3):
            await settled(admin, f"acme/a{number}", status="ready")
        await looks(admin, 4)
        acts = [entry.action for entry in await live.audit() if entry.actor == "source"]
        assert acts == ["adapter.create"] * 3
    admin = await live.http()
    lay(made[1], source / "acme" / "a0")

    async def is_second() -> bool:
        return bool((await admin.get(f"{ACME}/a0")).json()["version"] == 2)

    await until(is_second, 40)
    assert {entry["status"] for entry in (await entries(admin)).values()} == {"ready"}


async def test_a_bucket_may_be_a_source(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, bucket: BucketConfig, made: list[Path]
) -> None:
    """tenant/name/ below a prefix, with the store in another prefix of the same bucket: new, changed and gone. Without
    private_sources a server on this machine is refused, and nothing is read."""
    objects = Bucket(bucket)
    settings: dict[str, Any] = {
        "adapter_sources": (bucket.url,), "source_every_s": EVERY_S, "aws": dict(bucket.options),
        "adapter_store": bucket.url.replace("/adapters", "/store"),
    }  # fmt: skip

    def lay_there(directory: Path) -> None:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            objects.put(f"acme/pirate/{name}", (directory / name).read_bytes())

    lay_there(made[0])
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **settings) as refusing:
        await looks(await refusing.http(), 2)
        found = await source_of(await refusing.http())
        assert (found["status"], found["ready"]) == ("failed", 0)
        assert "private_sources" in found["error"]
    settings["private_sources"] = True
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **settings) as live:
        admin = await live.http()
        await admin.post("/admin/v1/tenants", json={"id": "acme"})
        first = await settled(admin, "acme/pirate", status="ready")
        lay_there(made[1])
        await digest_after(admin, first["digest"])
        assert (await admin.get(f"{ACME}/pirate")).json()["rank"] == 3
        objects.put("acme/stays/note.txt", b"so that the source is not empty")
        objects.delete([f"acme/pirate/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE)])

        async def is_gone() -> bool:
            return (await admin.get(f"{ACME}/pirate")).status_code == 404

        await until(is_gone)


async def test_only_admins_see_sources(live: Live) -> None:
    """A tenant's key opens neither route; a source that there is none of is 404; none at all is an empty list."""
    tenant = await live.http(await live.key("acme", "adapters:write"))
    assert (await tenant.get("/admin/v1/sources")).status_code in (401, 403, 404)
    admin = await live.http()
    assert error(await admin.get("/admin/v1/sources/nope/adapters"), 404)["code"] == "source_not_found"
    path = f"/admin/v1/sources/{(await source_of(admin))['id']}/adapters"
    assert error(await admin.get(path, params={"after": "x"}), 400)
