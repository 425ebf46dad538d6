"""Adapters over HTTP: upload, hot swap, activation, deletion; what is refused; who sees what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from safetensors.torch import load, save

from engine.protocol import AdapterState, Stats
from gateway.engine_metrics import STRUCTURED
from tests.gateway.live import Live
from tests.gateway.test_admin import error
from tests.tiny import tiny_adapter

ACME = "/admin/v1/tenants/acme/adapters"
SHARED = "/admin/v1/adapters"
OWN = "/v1/adapters"


@pytest.fixture
async def admin(live: Live) -> httpx.AsyncClient:
    client = await live.http()
    for tenant in ("acme", "globex"):
        await client.post("/admin/v1/tenants", json={"id": tenant})
    return client


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> list[tuple[bytes, bytes]]:
    """Ten different good adapters of rank 2 to 11, as (config, weights)."""
    root = tmp_path_factory.mktemp("ten")
    made = [tiny_adapter(root / str(i), tiny_llama, seed=i, rank=2 + i, targets=("q_proj",)) for i in range(10)]
    return [((d / "adapter_config.json").read_bytes(), (d / "adapter_model.safetensors").read_bytes()) for d in made]


def parts(files: tuple[bytes, bytes], name: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"config": ("../../evil.json", files[0]), "weights": ("/etc/passwd", files[1])}
    return body if name is None else body | {"name": (None, name.encode())}


async def upload(
    client: httpx.AsyncClient, files: tuple[bytes, bytes], name: str = "pirate", url: str = ACME
) -> httpx.Response:
    return await client.post(url, files=parts(files, name))


async def settle(live: Live, num_warmed: int) -> None:
    """Background acts follow their answers."""
    for _ in range(3000):
        if len(live.engine.warmed) >= num_warmed:
            return
        await asyncio.sleep(0.01)


async def test_an_upload_serves_at_once(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """HS-13: 201 says all about it; it is listed with its parent and called in the same breath; the engine is told to
    load it; model in the answer is the name that was asked for, plain and streaming."""
    made = await upload(admin, adapters[0])
    assert made.status_code == 201, made.text
    body = made.json()
    assert body["object"] == "adapter"
    assert (body["id"], body["tenant"], body["version"], body["status"]) == ("pirate", "acme", 1, "ready")
    assert (body["rank"], body["target_modules"], body["num_modules"]) == (2, ["q_proj"], 2)
    assert body["size_bytes"] == sum(map(len, adapters[0]))
    assert len(body["digest"].removeprefix("sha256:")) == 64

    caller = await live.openai(await live.key("acme"))
    listed = {model.id: model for model in (await caller.models.list()).data}
    extra = listed["pirate"].model_extra or {}
    assert (extra["parent"], extra["max_model_len"] > 0) == ("tiny", True)
    plain = await caller.chat.completions.create(model="pirate", messages=[{"role": "user", "content": "hi"}])
    stream = await caller.responses.create(model="pirate@1", input="hi", stream=True)
    assert plain.model == "pirate"
    assert [event async for event in stream][-1].response.model == "pirate@1"  # type: ignore[union-attr]
    digests = {request.adapter.digest for request in live.engine.requests if request.adapter}
    assert digests == {body["digest"].removeprefix("sha256:")}
    await settle(live, 1)
    assert [f"sha256:{ref.digest}" for ref in live.engine.warmed] == [body["digest"]]


async def test_shards_are_one_adapter(admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """An adapter in shards with their index is the same adapter as in one file; with a shard missing it is refused, and
    a replacement may come in shards, too."""
    config, weights = adapters[0]
    tensors = load(weights)
    names = sorted(tensors)
    shards = [save({name: tensors[name] for name in names[number::2]}) for number in range(2)]
    index = json.dumps({"weight_map": {name: f"../{number % 2}" for number, name in enumerate(names)}}).encode()

    def sharded(*chosen: bytes, name: str | None = "pirate") -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [("config", ("c", config)), ("index", ("i", index))]
        found += [("weights", ("w", shard)) for shard in chosen]
        return found if name is None else [*found, ("name", (None, name.encode()))]

    refused = await admin.post(ACME, files=sharded(shards[0]))
    assert (error(refused, 422)["code"], refused.json()["error"]["param"]) == ("tensor_missing", names[1])
    twice = await admin.post(ACME, files=sharded(*shards, shards[1]))
    assert error(twice, 422)["code"] == "tensor_duplicate"
    made = await admin.post(ACME, files=sharded(*shards))
    whole = await upload(admin, (config, save({name: tensors[name] for name in names[::2] + names[1::2]})), "whole")
    again = await admin.put(f"{ACME}/pirate", files=sharded(*shards, name=None))

    assert (made.status_code, whole.status_code, again.status_code) == (201, 201, 200), made.text
    assert made.json()["num_tensors"] == whole.json()["num_tensors"] == len(tensors)
    assert made.json()["digest"] == again.json()["digest"]
    shown = (await admin.get(f"{ACME}/pirate")).json()
    assert shown["status"] == "ready"


async def test_hot_swap_and_roll_back(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """PUT makes version 2 current at once, unless activate=false; activate moves it either way; versions stay
    callable by name@version; a compare-and-swap that lost is 409 and changes nothing."""
    first = (await upload(admin, adapters[0])).json()
    second = await admin.put(f"{ACME}/pirate", files=parts(adapters[1]))
    third = await admin.put(f"{ACME}/pirate?activate=false", files=parts(adapters[2]))
    assert (second.status_code, second.json()["version"], second.json()["current_version"]) == (200, 2, 2)
    assert (third.status_code, third.json()["version"], third.json()["current_version"]) == (200, 3, 2)

    caller = await live.openai(await live.key("acme"))

    async def rank_of(model: str) -> int:
        await caller.responses.create(model=model, input="hi")
        adapter = live.engine.requests[-1].adapter
        assert adapter is not None
        return adapter.rank

    assert [await rank_of(name) for name in ("pirate", "pirate@1", "pirate@2", "pirate@3")] == [3, 2, 3, 4]
    lost = await admin.post(f"{ACME}/pirate/activate", json={"version": 1, "if_current": 3})
    assert error(lost, 409)["param"] == "if_current"
    assert lost.headers["x-should-retry"] == "false"
    assert await rank_of("pirate") == 3
    back = await admin.post(f"{ACME}/pirate/activate", json={"version": 1, "if_current": 2})
    assert (back.status_code, back.json()["version"], back.json()["digest"]) == (200, 1, first["digest"])
    assert await rank_of("pirate") == 2
    assert error(await admin.post(f"{ACME}/pirate/activate", json={"version": 9}), 404)["code"] == "adapter_not_found"

    whole = (await admin.get(f"{ACME}/pirate")).json()
    assert [(v["version"], v["rank"], v["is_current"]) for v in whole["versions"]] == [
        (1, 2, True), (2, 3, False), (3, 4, False),
    ]  # fmt: skip
    assert whole["current_version"] == 1


async def test_where_an_adapter_is_resident(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """GET shows what the engines last said of each version."""
    digest = (await upload(admin, adapters[0])).json()["digest"].removeprefix("sha256:")
    assert (await admin.get(f"{ACME}/pirate")).json()["versions"][0]["resident"] == []

    numbers = dict.fromkeys((name for name in Stats.__struct_fields__ if name not in STRUCTURED), 0)
    states = [AdapterState(digest, "resident", 100, 2), AdapterState("0" * 64, "resident", 100, 0)]
    live.engine.stats = Stats(**numbers | {"boot_id": "boot", "adapters": states})  # type: ignore[arg-type]

    resident = (await admin.get(f"{ACME}/pirate")).json()["versions"][0]["resident"]
    assert resident == [{"engine": 0, "state": "resident", "num_running": 2}]


async def test_delete(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """New requests get 404 at once, versions too; the engine is told to let go; the name is free for another."""
    digest = (await upload(admin, adapters[0])).json()["digest"].removeprefix("sha256:")
    caller = await live.openai(await live.key("acme"))
    await caller.responses.create(model="pirate", input="hi")

    gone = await admin.delete(f"{ACME}/pirate")

    assert gone.json() == {"object": "adapter.deleted", "id": "pirate", "deleted": True}
    for model in ("pirate", "pirate@1"):
        with pytest.raises(openai.NotFoundError) as caught:
            await caller.responses.create(model=model, input="hi")
        assert caught.value.code == "model_not_found"
    for answer in (
        await admin.get(f"{ACME}/pirate"),
        await admin.delete(f"{ACME}/pirate"),
        await admin.put(f"{ACME}/pirate", files=parts(adapters[1])),
        await admin.post(f"{ACME}/pirate/activate", json={"version": 1}),
    ):
        assert error(answer, 404)["code"] == "adapter_not_found"
    assert [model.id for model in (await caller.models.list()).data] == ["tiny"]
    for _ in range(3000):
        await asyncio.sleep(0.01)
        if live.engine.evicted:
            break
    assert live.engine.evicted == [digest]
    again = await upload(admin, adapters[1])
    assert again.status_code == 201
    assert again.json()["version"] == 2  # numbers are never used again: pirate@1 can't come to mean something else


async def test_shared_digests_are_not_evicted(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Deleting one of two names of the same files leaves the engine's copy alone."""
    await upload(admin, adapters[0])
    await upload(admin, adapters[0], url="/admin/v1/tenants/globex/adapters")

    await admin.delete(f"{ACME}/pirate")
    await asyncio.sleep(0.1)

    assert live.engine.evicted == []
    caller = await live.openai(await live.key("globex"))
    assert (await caller.responses.create(model="pirate", input="hi")).status == "completed"


async def test_ten_uploads_of_one_name(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """HS-05: of ten parallel uploads of one name exactly one is 201, the others 409; what serves is its file."""
    answers = await asyncio.gather(*(upload(admin, files) for files in adapters))

    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 9
    won = next(answer.json() for answer in answers if answer.status_code == 201)
    for answer in answers:
        if answer.status_code == 409:
            assert error(answer, 409)["param"] == "name"
            assert answer.headers["x-should-retry"] == "false"
    listed = (await admin.get(ACME)).json()["data"]
    assert [(row["id"], row["digest"], row["version"]) for row in listed] == [("pirate", won["digest"], 1)]


async def test_uploads_swaps_and_deletes_at_once(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """HS-05: whatever the mix, answers are 200, 201, 404 or 409, version numbers never repeat, and the end is one
    adapter whose files are exactly one of those sent."""
    seen: list[int] = []

    async def act(i: int) -> None:
        files = adapters[i % len(adapters)]
        answer = await (
            admin.delete(f"{ACME}/pirate") if i % 5 == 4
            else admin.put(f"{ACME}/pirate", files=parts(files)) if i % 2
            else upload(admin, files)
        )  # fmt: skip
        assert answer.status_code in (200, 201, 404, 409), answer.text
        if "version" in answer.json():
            seen.append(answer.json()["version"])

    for wave in range(3):
        await asyncio.gather(*(act(wave * 8 + i) for i in range(8)))
    if not (await admin.get(ACME)).json()["data"]:
        seen.append((await upload(admin, adapters[0])).json()["version"])

    assert len(seen) == len(set(seen))
    (row,) = (await admin.get(ACME)).json()["data"]
    assert row["rank"] in range(2, 12)
    caller = await live.openai(await live.key("acme"))
    await caller.responses.create(model="pirate", input="hi")
    adapter = live.engine.requests[-1].adapter
    assert adapter is not None
    assert f"sha256:{adapter.digest}" == row["digest"]


async def test_names(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """HS-14, AU-05, AU-11: the base's name is reserved; names outside the pattern are 400, kept as text, never a path
    or a reference; "A" and "a" are two; every accepted name can be read and deleted."""
    for name in (
        "tiny", "TINY", "org/a@v1", "a/", "..", "../../x", "/etc", "a/../../b", "%2e%2e/", "C:\\x", "a b", "é", "é",
        "a" * 300, "a\nb", "a\0b", "\u200fa", "🦜", "", "-a", "a@1", "os.environ/X", "${REDIS_URL}", "{{env}}",
    ):  # fmt: skip
        refused = error(await upload(admin, adapters[0], name), 400)
        assert refused["param"] == "name", name
        assert refused["code"] in ("name_invalid", "name_reserved")
    for name in ("A", "a", "a.b-c_d", "0", "x" * 64):
        assert (await upload(admin, adapters[0], name)).status_code == 201
    assert {row["id"] for row in (await admin.get(ACME)).json()["data"]} == {"A", "a", "a.b-c_d", "0", "x" * 64}
    for name in ("A", "a.b-c_d", "0", "x" * 64):
        assert (await admin.get(f"{ACME}/{name}")).json()["id"] == name
        assert (await admin.delete(f"{ACME}/{name}")).status_code == 200
    assert [row["id"] for row in (await admin.get(ACME)).json()["data"]] == ["a"]
    everything = {path.name for path in await asyncio.to_thread(_files, live.settings.data_dir)}
    assert not [name for name in everything if "evil" in name or "passwd" in name]


def _files(root: Path) -> list[Path]:
    return list(root.rglob("*"))


def broken(files: tuple[bytes, bytes], kind: str) -> tuple[bytes, bytes]:
    config, weights = files
    settings = json.loads(config)
    changed = {
        "rank too high": (json.dumps(settings | {"r": 8}).encode(), weights),
        "corrupt": (config, weights[:-1]),
        "pickle": (config, b"\x80\x04\x95" + weights),
        "pointer": (config, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        "empty": (config, b""),
        "dora": (json.dumps(settings | {"use_dora": True}).encode(), weights),
        "not lora": (json.dumps(settings | {"peft_type": "IA3"}).encode(), weights),
        "not json": (b"{", weights),
    }
    return changed[kind]


async def test_bad_adapters_are_refused_and_forgotten(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any]
) -> None:
    """AL-16, AL-20 over HTTP: each bad upload is 422 with a code; streams that run are not disturbed; no file stays;
    the version that serves is unchanged; and the name is free for a good one."""
    live.engine._delay_s = 0.02
    live.answers = ["word " * 100] * 4
    await upload(admin, adapters[0], "serving")
    caller = await live.openai(await live.key("acme"))
    before = await asyncio.to_thread(_files, live.settings.store_dir)

    async def read(model: str) -> str:
        stream = await caller.responses.create(model=model, input="hi", stream=True)
        return [event async for event in stream][-1].response.output_text  # type: ignore[union-attr]

    streams = asyncio.gather(*(read(model) for model in ("tiny", "serving", "tiny", "serving")))
    codes = set()
    kinds = ("rank too high", "corrupt", "pickle", "pointer", "empty", "dora", "not lora", "not json")
    for i, kind in enumerate(kinds):
        files = broken(adapters[0], kind)
        answer = await (upload(admin, files) if i % 2 else admin.put(f"{ACME}/serving", files=parts(files)))
        refused = error(answer, 422)
        assert refused["type"] == "invalid_request_error"
        codes.add(refused["code"])
    assert None not in codes
    assert len(codes) >= 6

    live.engine._delay_s = 0.0
    assert await streams == ["word " * 100] * 4
    assert await asyncio.to_thread(_files, live.settings.store_dir) == before
    assert [(row["id"], row["version"]) for row in (await admin.get(ACME)).json()["data"]] == [("serving", 1)]
    assert (await upload(admin, adapters[0])).status_code == 201
    assert (await admin.get("/livez")).status_code == 200


async def test_rank_above_the_limit(live: Live, admin: httpx.AsyncClient, tmp_path: Path, tiny_llama: Path) -> None:
    """AL-16: a rank above --max-lora-rank is refused at the door, not inside a forward step."""
    directory = tiny_adapter(tmp_path / "big", tiny_llama, rank=65, targets=("q_proj",))
    files = ((directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes())

    refused = error(await upload(admin, files), 422)

    assert refused["code"] == "rank_too_large"
    assert "65" in refused["message"]
    assert "64" in refused["message"]


async def test_more_than_the_engine_has_room_for(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AL-31: what could never be loaded is refused at upload, not at its first use."""
    assert live.engine.ready is not None
    live.engine.ready = msgspec.structs.replace(live.engine.ready, adapter_memory_bytes=1000)

    assert error(await upload(admin, adapters[0]), 413)["code"] == "adapter_too_large"
    assert (await admin.get(ACME)).json()["data"] == []


async def test_bodies_that_are_no_upload(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Missing, unknown and doubled parts, JSON instead of multipart: 400 that names the part; nothing stays."""
    config, weights = adapters[0]
    for files, param in (
        ({"name": (None, b"x"), "config": ("c", config)}, "weights"),
        ({"name": (None, b"x"), "weights": ("w", weights)}, "config"),
        ({"config": ("c", config), "weights": ("w", weights)}, "name"),
        ({**parts(adapters[0], "x"), "path": (None, b"/etc")}, "path"),
        ({**parts(adapters[0], "x"), "digest": (None, b"0" * 64)}, "digest"),
    ):
        assert error(await admin.post(ACME, files=files), 400)["param"] == param
    await upload(admin, adapters[0])
    assert error(await admin.put(f"{ACME}/pirate", files=parts(adapters[1], "other")), 400)["param"] == "name"
    assert error(await admin.post(ACME, json={"name": "x"}), 400)["code"] == "invalid_content_type"
    assert error(await admin.post(f"{ACME}/pirate/activate", json={"version": 0}), 400)["param"] == "version"
    assert error(await admin.post(f"{ACME}/pirate/activate", json={"version": 1, "force": 1}), 400)["param"] == "force"
    assert error(await admin.put(f"{ACME}/pirate?activate=maybe", files=parts(adapters[1])), 400)["param"] == "activate"
    assert await asyncio.to_thread(lambda: list((live.settings.store_dir / "stage").iterdir())) == []


async def test_a_client_that_leaves_leaves_nothing(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """An upload that breaks off has no stage, no name, no file."""
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {ACME} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {live.settings.admin_key}\r\n"
        "content-type: multipart/form-data; boundary=xyz\r\ncontent-length: 100000\r\n\r\n"
        '--xyz\r\ncontent-disposition: form-data; name="weights"\r\n\r\n'
    )
    writer.write(head.encode() + b"x" * 5000)
    await writer.drain()
    stages = live.settings.store_dir / "stage"
    for _ in range(3000):
        await asyncio.sleep(0.01)
        if await asyncio.to_thread(lambda: list(stages.iterdir())):
            break
    writer.close()

    for _ in range(3000):
        await asyncio.sleep(0.01)
        if not await asyncio.to_thread(lambda: list(stages.iterdir())):
            break
    assert await asyncio.to_thread(lambda: list(stages.iterdir())) == []
    assert reader is not None
    assert (await admin.get(ACME)).json()["data"] == []


async def test_self_service(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """A key with adapters:write keeps its own tenant's adapters and can't name another's; without the scope it is
    403; the audit log says which key it was."""
    writer = await live.http(await live.key("acme", "inference", "adapters:write"))
    reader = await live.http(await live.key("acme"))

    made = await upload(writer, adapters[0], url=OWN)
    assert (made.status_code, made.json()["tenant"]) == (201, "acme")
    assert (await writer.put(f"{OWN}/pirate", files=parts(adapters[1]))).json()["version"] == 2
    assert (await writer.post(f"{OWN}/pirate/activate", json={"version": 1})).json()["version"] == 1
    assert [row["id"] for row in (await writer.get(OWN)).json()["data"]] == ["pirate"]
    assert len((await writer.get(f"{OWN}/pirate")).json()["versions"]) == 2
    assert (await admin.get(f"{ACME}/pirate")).status_code == 200

    for method, path in (("POST", OWN), ("GET", OWN), ("GET", f"{OWN}/pirate"), ("PUT", f"{OWN}/pirate"),
                         ("DELETE", f"{OWN}/pirate"), ("POST", f"{OWN}/pirate/activate")):  # fmt: skip
        assert error(await reader.request(method, path), 403)["code"] == "insufficient_permissions"
    assert (await writer.delete(f"{OWN}/pirate")).status_code == 200
    rows = [row for row in await live.audit() if row.action.startswith("adapter.")]
    assert [row.action for row in rows] == ["adapter.create", "adapter.replace", "adapter.activate", "adapter.delete"]
    assert {row.tenant_id for row in rows} == {"acme"}
    assert all(row.actor.startswith("key:") and row.request_id.startswith("req_") for row in rows)


async def test_another_tenants_adapter_is_not_there(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """AU-03, HS-03: B can't list, call, read, swap or delete A's adapter, by name, version or digest: the answer is
    that of a name that nobody has."""
    digest = (await upload(admin, adapters[0])).json()["digest"]
    key = await live.key("globex", "inference", "adapters:write")
    stranger, caller = await live.http(key), await live.openai(key)

    for names in (
        ("pirate", "nobody"),
        ("pirate@1", "nobody@1"),
        (digest, "sha256:" + "0" * 64),
        ("acme/pirate", "acme/no"),
    ):
        said = []
        for name in names:
            with pytest.raises(openai.NotFoundError) as caught:
                await caller.responses.create(model=name, input="hi")
            with pytest.raises(openai.NotFoundError):
                await caller.models.retrieve(name)
            said.append(str(caught.value.body).replace(name, "X"))
        assert said[0] == said[1]
    for method, suffix, body in (
        ("GET", "", {}), ("DELETE", "", {}), ("PUT", "", {"files": parts(adapters[1])}),
        ("POST", "/activate", {"json": {"version": 1}}),
    ):  # fmt: skip
        said = []
        for name in ("pirate", "nobody"):
            answer = await stranger.request(method, f"{OWN}/{name}{suffix}", **body)
            said.append(str(error(answer, 404)).replace(name, "X"))
        assert said[0] == said[1]
    assert [model.id for model in (await caller.models.list()).data] == ["tiny"]
    assert (await stranger.get(OWN)).json()["data"] == []
    assert (await admin.get(f"{ACME}/pirate")).json()["current_version"] == 1
    assert live.engine.requests == []


async def test_shared_adapters(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """A shared adapter is everybody's; a tenant's own of the same name wins for that tenant alone; a tenant can
    neither see it among its own nor change it."""
    await upload(admin, adapters[0], url=SHARED)
    await upload(admin, adapters[5])
    acme, globex = [
        await live.openai(await live.key(tenant, "inference", "adapters:write")) for tenant in ("acme", "globex")
    ]

    ranks = []
    for caller in (acme, globex):
        await caller.responses.create(model="pirate", input="hi")
        adapter = live.engine.requests[-1].adapter
        assert adapter is not None
        ranks.append(adapter.rank)
        assert [model.id for model in (await caller.models.list()).data] == ["tiny", "pirate"]
    assert ranks == [7, 2]
    globex_http = await live.http(globex.api_key)
    assert (await globex_http.get(OWN)).json()["data"] == []
    error(await globex_http.delete(f"{OWN}/pirate"), 404)
    assert (await admin.get(SHARED)).json()["data"][0]["tenant"] is None

    await admin.delete(f"{SHARED}/pirate")
    with pytest.raises(openai.NotFoundError):
        await globex.responses.create(model="pirate", input="hi")
    await acme.responses.create(model="pirate", input="hi")


async def test_adapters_go_with_their_tenant(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """A new tenant of a deleted tenant's id finds neither its adapters nor its responses."""
    await upload(admin, adapters[0])
    caller = await live.openai(await live.key("acme"))
    made = await caller.responses.create(model="pirate", input="hi")
    gone = await admin.delete("/admin/v1/tenants/acme")
    assert gone.status_code == 200, gone.text
    live.keys.clear()

    caller = await live.openai(await live.key("acme"))
    for _ in range(3000):
        try:
            await caller.responses.retrieve(made.id)
        except openai.NotFoundError:
            break
        await asyncio.sleep(0.01)

    assert (await admin.get(ACME)).json()["data"] == []
    with pytest.raises(openai.NotFoundError):
        await caller.responses.create(model="pirate", input="hi")
    with pytest.raises(openai.NotFoundError):
        await caller.responses.retrieve(made.id)
    assert live.engine.evicted


async def test_a_pin_follows_the_name(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """The engines are told the current version's digest, after a replacement the new one's, after the end none; the
    acts are in the audit log; a tenant's key may not."""
    first = (await upload(admin, adapters[0])).json()["digest"]
    assert (await admin.post(f"{ACME}/pirate/pin")).json() == {
        "object": "adapter.pin", "id": "pirate", "tenant": "acme", "pinned": True,
    }  # fmt: skip
    assert [f"sha256:{ref.digest}" for ref in live.engine.kept] == [first]

    second = (await admin.put(f"{ACME}/pirate", files=parts(adapters[1]))).json()["digest"]
    for _ in range(3000):
        if [f"sha256:{ref.digest}" for ref in live.engine.kept] == [second]:
            break
        await asyncio.sleep(0.01)
    assert [f"sha256:{ref.digest}" for ref in live.engine.kept] == [second]

    assert (await admin.delete(f"{ACME}/pirate/pin")).json()["pinned"] is False
    assert live.engine.kept == []
    await admin.post(f"{ACME}/pirate/pin")
    await admin.delete(f"{ACME}/pirate")
    error(await admin.post(f"{ACME}/pirate/pin"), 404)
    assert {"adapter.pin", "adapter.unpin"} <= {entry.action for entry in await live.audit()}
    tenant = await live.http(await live.key("acme"))
    assert (await tenant.post(f"{ACME}/pirate/pin")).status_code == 403


async def test_pins_that_could_exhaust_the_memory_are_refused(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any]
) -> None:
    """What would leave no room for the largest adapter is 409 at once, and nothing is pinned by it."""
    await upload(admin, adapters[0])
    live.engine.ready = msgspec.structs.replace(live.engine.ready, pin_memory_bytes=10)  # type: ignore[type-var]
    refused = await admin.post(f"{ACME}/pirate/pin")

    assert error(refused, 409)["code"] == "pins_exhausted"
    assert live.engine.kept == []
