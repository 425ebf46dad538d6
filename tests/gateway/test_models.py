"""Who may call what: the model list, adapters by name and version, allow-lists, and no trace of other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError
from sqlalchemy import Engine, event

from tests.gateway.live import Live
from tests.gateway.scripted import Script, chat, error_of, stream_of
from tests.tiny import tiny_adapter

PATH = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapter(root / str(seed), tiny_llama, seed=seed) for seed in range(3)]


async def upload(server: Live, where: str, name: str, files: Path, method: str = "POST") -> dict[str, Any]:
    admin = await server.http()
    parts: dict[str, Any] = {
        "config": (files / "adapter_config.json").read_bytes(),
        "weights": (files / "adapter_model.safetensors").read_bytes(),
    }
    path = f"/admin/v1/{where}" if method == "POST" else f"/admin/v1/{where}/{name}"
    answer = await admin.request(method, path, data={"name": name} if method == "POST" else {}, files=parts)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


BY_THEMSELVES = ("INSERT INTO usage_", "UPDATE api_keys SET last_used_at")
"""The ledger and a key's last use are written now and then, whoever asks."""


@contextmanager
def statements() -> Iterator[list[str]]:
    """What SQL is asked of any database, but for what runs by itself."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        is_asked = "adapter" in statement or "api_keys" in statement
        if is_asked and not statement.startswith(BY_THEMSELVES):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def names(server: Live, key: str) -> list[str]:
    client = await server.openai(key)
    return [model.id async for model in client.models.list()]


async def test_what_is_listed_can_be_called(server: Live, adapters: list[Path]) -> None:
    """T8, T9, HS-13: right after the upload the adapter is listed with its parent and length, though it was never in
    the engine's memory, and answers under the name that was asked for, with its version in a header."""
    script = Script().install(server)
    key = await server.key("acme")
    client = await server.http(key)
    assert (await client.post(PATH, json={**chat(), "model": "pirate"})).status_code == 404
    made = await upload(server, "tenants/acme/adapters", "pirate", adapters[0])

    listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    one = (await client.get("/v1/models/pirate")).json()
    plain = await client.post(PATH, json={**chat(), "model": "pirate"})
    chunks = await stream_of(client, PATH, {**chat(), "model": "pirate"})

    assert listed["pirate"] == one
    assert one["parent"] == "tiny"
    assert one["max_model_len"] == listed["tiny"]["max_model_len"] == 2048
    assert (one["object"], one["owned_by"], one["version"]) == ("model", "acme", 1)
    assert listed["tiny"]["parent"] is None
    assert plain.json()["model"] == "pirate"
    assert plain.headers["x-adapter-version"] == "1"
    assert plain.headers["x-chorus-adapter-tier"] == "disk"
    streamed = await client.post(PATH, json={**chat(stream=True), "model": "pirate"})
    assert streamed.headers["x-chorus-adapter-tier"] == "disk"
    assert "x-chorus-adapter-tier" not in (await client.post(PATH, json=chat())).headers
    assert {chunk["model"] for chunk in chunks} == {"pirate"}
    assert script.requests[0].adapter is not None
    assert f"sha256:{script.requests[0].adapter.digest}" == made["digest"] == one["digest"]


async def test_a_new_version_answers_at_once(server: Live, adapters: list[Path]) -> None:
    """T40, T52: after a swap the very next call uses the new digest, versions stay callable by number, the fingerprint
    changes, and a deleted adapter is gone at once."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))
    first = await upload(server, "tenants/acme/adapters", "swap", adapters[0])
    before = (await client.post(PATH, json={**chat(), "model": "swap"})).json()
    second = await upload(server, "tenants/acme/adapters", "swap", adapters[1], "PUT")

    after = await client.post(PATH, json={**chat(), "model": "swap"})
    old = await client.post(PATH, json={**chat(), "model": "swap@1"})
    none = await client.post(PATH, json={**chat(), "model": "swap@3"})
    await (await server.http()).delete("/admin/v1/tenants/acme/adapters/swap")
    gone = await client.post(PATH, json={**chat(), "model": "swap"})

    digests = [f"sha256:{request.adapter.digest}" for request in script.requests if request.adapter]
    assert digests == [first["digest"], second["digest"], first["digest"]]
    assert after.headers["x-adapter-version"] == "2"
    assert old.json()["model"] == "swap@1"
    assert before["system_fingerprint"] != after.json()["system_fingerprint"]
    assert before["system_fingerprint"] == old.json()["system_fingerprint"]
    assert none.status_code == gone.status_code == 404


async def test_foreign_is_as_unknown(server: Live, adapters: list[Path]) -> None:
    """T5, T8, AU-03: another tenant's adapter is 404 like a random name, with the same body but for the name and after
    the same look-ups, for every route that takes a model, and is in no list."""
    await server.key("acme")
    await upload(server, "tenants/acme/adapters", "secret", adapters[0])
    key = await server.key("bolt")
    client = await server.http(key)

    for path, body in [
        (PATH, chat()), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}), ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
    ]:  # fmt: skip
        await client.post(path, json={**body, "model": "seeekret"})
        with statements() as asked:
            foreign = await client.post(path, json={**body, "model": "secret"})
            num_foreign = len(asked)
            unknown = await client.post(path, json={**body, "model": "sekret"})
        assert asked[:num_foreign] == asked[num_foreign:], path
        assert num_foreign
        assert foreign.status_code == unknown.status_code == 404, path
        assert foreign.text == unknown.text.replace("sekret", "secret")
        assert error_of(foreign)["code"] == "model_not_found"
    for name in ("secret", "secret@1", "acme:secret", "acme/secret"):
        assert (await client.get(f"/v1/models/{name}")).status_code == 404
    assert "secret" not in await names(server, key)
    assert not server.engine.requests


@pytest.mark.parametrize(
    "name",
    ["A-typo", "", "PIRATE2 ", "pirate2 ", "Pirate2", "tiny:pirate2", "tiny@1", "TINY", " tiny", "pirate2@",
     "pirate2@0", "pirate2@01", "pirate2@x", "pirate2\n", "../pirate2", "x" * 300, "x" * 100_000, "é", "🚀", "\x00"],
)  # fmt: skip
async def test_no_name_falls_back_to_the_base(server: Live, adapters: list[Path], name: str) -> None:
    """HS-03: a name that is not exactly right is 404 model_not_found; nothing is generated, no quota used."""
    admin = await server.http()
    await server.key("carl")
    if (await admin.get("/admin/v1/tenants/carl/adapters/pirate2")).status_code == 404:
        await upload(server, "tenants/carl/adapters", "pirate2", adapters[0])
        limits = {"requests_per_minute": 1000}
        await admin.patch("/admin/v1/tenants/carl", json={"limits": limits})
    client = await server.http(await server.key("carl"))
    before = await client.post(PATH, json=chat())
    server.engine.requests.clear()

    answer = await client.post(PATH, json={**chat(), "model": name})

    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["code"], error["type"], error["param"]) == ("model_not_found", "invalid_request_error", "model")
    assert not server.engine.requests
    after = await client.post(PATH, json=chat())
    left = [int(good.headers["x-ratelimit-remaining-requests"]) for good in (before, after)]
    assert left[0] - left[1] <= 1


async def test_ids_in_paths(server: Live, adapters: list[Path]) -> None:
    """T7: ids with slashes and other characters reach the route and are looked up, whatever the client escapes; and are
    found where a tenant has such a name."""
    client = await server.openai(await server.key("acme"))
    await upload(server, "tenants/acme/adapters", "v.1_x-Y", adapters[0])
    own = await server.openai(await server.key("odd-names"))
    odd = ["acme/ad:1", "a/b/c", "x y", "é", "a#b?c", "%2F", "../tiny", "ft:gpt-4o:acme::7p4l"]
    answer = await (await server.http()).patch(
        "/admin/v1/tenants/odd-names", json={"model_names": dict.fromkeys(odd, "tiny")}
    )
    assert answer.status_code == 200, answer.text
    assert {model.id async for model in own.models.list()} == {"tiny", *odd}
    for name in odd:
        if name != "../tiny":  # clients resolve it themselves
            assert (await own.models.retrieve(name)).id == name

    assert (await client.models.retrieve("v.1_x-Y")).id == "v.1_x-Y"
    assert (await client.models.retrieve("v.1_x-Y@1")).id == "v.1_x-Y@1"
    for name in ("acme/ad:1", "a/b/c", "x y", "é"):
        with pytest.raises(NotFoundError, match=f"`{name}` does not exist"):
            await client.models.retrieve(name)


async def test_shared_adapters(server: Live, adapters: list[Path]) -> None:
    """A shared adapter is there for all, once; a tenant's own of the same name wins, for it alone."""
    script = Script().install(server)
    shared = await upload(server, "adapters", "common", adapters[0])
    own = await upload(server, "tenants/acme/adapters", "common", adapters[1])
    a, b = await server.key("acme"), await server.key("bolt")

    for key in (a, b):
        assert (await names(server, key)).count("common") == 1
        await (await server.http(key)).post(PATH, json={**chat(), "model": "common"})

    digests = [f"sha256:{request.adapter.digest}" for request in script.requests if request.adapter]
    assert digests == [own["digest"], shared["digest"]]


async def test_allow_lists(server: Live, adapters: list[Path]) -> None:
    """AU-03, QB-09: what is not on the tenant's and the key's list is neither listed nor found, by no name and no
    version, on no endpoint; a changed list acts at the next call."""
    await upload(server, "adapters", "allow-a", adapters[0])
    await upload(server, "adapters", "deny-b", adapters[1])
    admin = await server.http()
    key = await server.key("dora")
    client = await server.http(key)
    assert (await client.post(PATH, json={**chat(), "model": "deny-b"})).status_code == 200
    await admin.patch("/admin/v1/tenants/dora", json={"models": ["tiny", "allow-*"]})

    keys = "/admin/v1/tenants/dora/keys"
    narrow = (await admin.post(keys, json={"name": "n", "models": ["allow-*", "deny-*"]})).json()["key"]
    assert await names(server, key) == ["tiny", "allow-a"]
    assert await names(server, narrow) == ["allow-a"]
    narrower = await server.http(narrow)
    for name, status, of_narrow in [
        ("allow-a", 200, 200), ("allow-a@1", 200, 200), ("tiny", 200, 404), ("deny-b", 404, 404),
        ("deny-b@1", 404, 404),
    ]:  # fmt: skip
        for caller, expected in ((client, status), (narrower, of_narrow)):
            for path, body in [
                (PATH, chat()), (PATH, chat(stream=True)), ("/v1/completions", {"prompt": "x"}),
                ("/v1/completions", {"prompt": "x", "stream": True}), ("/v1/responses", {"input": "x"}),
                ("/v1/responses", {"input": "x", "stream": True}), ("/tokenize", {"prompt": "x"}),
            ]:  # fmt: skip
                answer = await caller.post(path, json={**body, "model": name})
                assert answer.status_code == expected, (path, name)
            assert (await caller.get(f"/v1/models/{name}")).status_code == expected, name
    await admin.patch("/admin/v1/tenants/dora", json={"models": []})
    assert await names(server, key) == []
    assert (await client.post(PATH, json=chat())).status_code == 404


async def test_the_list_is_whole_while_the_engine_is_away(server: Live) -> None:
    """T9: models are listed and found without an engine; inference says 503."""
    server.engine.ready = None
    client = await server.http(await server.key("acme"))

    assert "tiny" in [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    answer = await client.post(PATH, json=chat())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(answer)["type"] == "server_error"
    assert (await client.post(PATH, json={**chat(), "model": "nope"})).status_code == 404
