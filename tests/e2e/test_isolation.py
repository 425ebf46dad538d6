"""Isolation, with real processes: nothing of tenant A is there for tenant B. Whatever B asks for by A's names and ids,
the answer is the one that a random name gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.callers import files_of
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter

MODEL = "tiny-llama"
BEARER = {"A": "alpha-co", "B": "beta-co"}


@dataclass
class Two:
    """A has an adapter, a response, a conversation with an item and a key; B is a stranger with every scope."""

    server: ChorusProcess
    stranger: httpx.Client
    owner: httpx.Client
    ids: dict[str, tuple[str, str]]
    """What B may try: A's id, and one that nobody has."""
    files: Path

    def ask(self, method: str, path: str, **content: Any) -> tuple[int, str]:
        answer = self.stranger.request(method, path, **content)
        return answer.status_code, answer.text

    def same(self, what: str, method: str, path: str, status: int = 404, **content: Any) -> None:
        """B's answer for A's id is that for a random one, but for the id itself, which B sent."""
        said = []
        for name in self.ids[what]:
            filled = {key: _fill(value, name) for key, value in content.items()}
            code, text = self.ask(method, path.replace("{}", name), **filled)
            assert code == status, (method, path, name, text)
            said.append(text.replace(name, "X"))
        assert said[0] == said[1], (method, path)


def _fill(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill(inner, name) for key, inner in value.items()}
    return value.replace("{}", name) if isinstance(value, str) else value


def client(server: ChorusProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def random_like(found: str) -> str:
    """An id of the same form that nobody has."""
    prefix, _, rest = found.rpartition("_")
    return f"{prefix}_{'0' * len(rest)}" if prefix else "0" * len(found)


@pytest.fixture(scope="module")
def two(serving: ChorusProcess, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    path = tiny_adapter(tmp_path_factory.mktemp("isolation") / "a", tiny_llama, seed=80)
    keys, key_ids = {}, {}
    for name, tenant in BEARER.items():
        serving.admin("POST", "tenants", json={"id": tenant})
        body = {"name": "all", "scopes": ["inference", "adapters:write"]}
        made = serving.admin("POST", f"tenants/{tenant}/keys", json=body).json()
        keys[name], key_ids[name] = made["key"], made["id"]
    with client(serving, keys["A"]) as owner, client(serving, keys["B"]) as stranger:
        adapter = owner.post("/v1/adapters", files=files_of(path), data={"name": "secret"}).json()
        answer = owner.post("/v1/responses", json={"model": "secret", "input": "hi", "max_output_tokens": 16}).json()
        for _ in range(200):  # the day of its last use comes with the ledger's entry
            if owner.get("/v1/adapters/secret").json()["last_used_on"]:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the ledger never told of A's own use")
        talk = owner.post("/v1/conversations", json={"items": [{"role": "user", "content": "hello"}]}).json()
        (item,) = owner.get(f"/v1/conversations/{talk['id']}/items").json()["data"]
        ids = {
            "adapter": ("secret", "random"),
            "version": ("secret@1", "random@1"),
            "digest": (adapter["digest"], "sha256:" + "0" * 64),
            "plain digest": (adapter["digest"].removeprefix("sha256:"), "0" * 64),
            "path": ("alpha-co/secret", "alpha-co/random"),
            "response": (answer["id"], random_like(answer["id"])),
            "conversation": (talk["id"], random_like(talk["id"])),
            "item": (item["id"], random_like(item["id"])),
            "key": (key_ids["A"], random_like(key_ids["A"])),
        }
        yield Two(serving, stranger, owner, ids, path)


@pytest.mark.parametrize("what", ["adapter", "version", "digest", "plain digest", "path"])
def test_adapters_can_not_be_called(two: Two, what: str) -> None:
    """AU-03: by name, version, internal id or path, on every route that takes a model: 404 as for a random name."""
    messages = [{"role": "user", "content": "hi"}]
    two.same(what, "POST", "/v1/chat/completions", json={"model": "{}", "messages": messages})
    two.same(what, "POST", "/v1/chat/completions", json={"model": "{}", "messages": messages, "stream": True})
    two.same(what, "POST", "/v1/completions", json={"model": "{}", "prompt": "hi"})
    two.same(what, "POST", "/v1/responses", json={"model": "{}", "input": "hi"})
    two.same(what, "POST", "/tokenize", json={"model": "{}", "prompt": "hi"})
    two.same(what, "GET", "/v1/models/{}")


def test_adapters_can_not_be_read_or_changed(two: Two) -> None:
    """AU-03: B's own adapter routes do not know A's names; the answers are those for a random name, and A's adapter is
    as it was."""
    before = two.owner.get("/v1/adapters/secret").json()
    for what in ("adapter", "digest", "plain digest", "version"):
        two.same(what, "GET", "/v1/adapters/{}")
        two.same(what, "DELETE", "/v1/adapters/{}")
        two.same(what, "POST", "/v1/adapters/{}/activate", json={"version": 1})
        two.same(what, "PUT", "/v1/adapters/{}", files=files_of(two.files))
    after = two.owner.get("/v1/adapters/secret").json()

    for found in (before, after):  # it may have been loaded meanwhile, which is no change of it
        del found["tier"]
        for version in found["versions"]:
            del version["resident"]
    assert after == before


def test_nothing_of_another_is_listed(two: Two) -> None:
    """B's lists hold nothing of A: models, adapters, and whatever else can be listed with B's key."""
    models = two.stranger.get("/v1/models").json()["data"]

    assert [model["id"] for model in models] == [MODEL]
    assert two.stranger.get("/v1/adapters").json()["data"] == []
    assert {model["id"] for model in two.owner.get("/v1/models").json()["data"]} == {MODEL, "secret"}


def test_responses_are_not_there(two: Two) -> None:
    """AU-04, T45: A's response can be neither read, continued nor deleted by B."""
    two.same("response", "GET", "/v1/responses/{}")
    two.same("response", "GET", "/v1/responses/{}/input_items")
    two.same("response", "DELETE", "/v1/responses/{}")
    body = {"model": MODEL, "input": "go on", "previous_response_id": "{}"}
    two.same("response", "POST", "/v1/responses", json=body)
    two.same("response", "POST", "/v1/responses", json=body | {"stream": True})

    assert two.owner.get(f"/v1/responses/{two.ids['response'][0]}").status_code == 200


def test_conversations_are_not_there(two: Two) -> None:
    """AU-04: A's conversation can be neither read, changed, continued nor deleted by B; nor can its items."""
    url, talk = "/v1/conversations/{}", two.ids["conversation"][0]
    two.same("conversation", "GET", url)
    two.same("conversation", "POST", url, json={"metadata": {"a": "b"}})
    two.same("conversation", "DELETE", url)
    two.same("conversation", "GET", f"{url}/items")
    two.same("conversation", "POST", f"{url}/items", json={"items": [{"role": "user", "content": "x"}]})
    item = two.ids["item"][0]
    two.same("conversation", "GET", f"{url}/items/{item}")
    two.same("conversation", "DELETE", f"{url}/items/{item}")
    two.same("conversation", "POST", "/v1/responses", json={"model": MODEL, "input": "hi", "conversation": "{}"})
    own = two.stranger.post("/v1/conversations", json={}).json()["id"]
    two.same("item", "GET", f"/v1/conversations/{own}/items/{{}}")

    assert len(two.owner.get(f"/v1/conversations/{talk}/items").json()["data"]) == 1


def test_administration_is_closed(two: Two) -> None:
    """Keys and usage of anybody are the admin's: B is 403 on every admin route, for A's ids as for random ones."""
    for path in (
        "/admin/v1/tenants", "/admin/v1/tenants/{}", "/admin/v1/tenants/{}/keys", "/admin/v1/tenants/{}/adapters",
        "/admin/v1/adapters", "/admin/v1/usage?tenant={}",
    ):  # fmt: skip
        said = {two.ask("GET", path.replace("{}", tenant)) for tenant in (*BEARER.values(), "nobody")}
        assert len(said) == 1, path
        assert said.pop()[0] == 403
    two.same("key", "GET", "/admin/v1/tenants/alpha-co/keys/{}", 403)
    two.same("key", "DELETE", "/admin/v1/tenants/alpha-co/keys/{}", 403)
    for path in ("/v1/keys", "/v1/tenants"):
        assert two.ask("GET", path)[0] == 404

    assert two.owner.get("/v1/models").status_code == 200


def test_the_admin_finds_keys_under_their_own_tenant_only(two: Two) -> None:
    """A's key under B's name is as unknown as a random one: no slip of the admin revokes another tenant's key."""
    said = []
    for key in two.ids["key"]:
        answer = two.server.admin("DELETE", f"tenants/{BEARER['B']}/keys/{key}")
        said.append((answer.status_code, answer.text.replace(key, "X")))

    assert said[0] == said[1]
    assert said[0][0] == 404
    assert two.owner.get("/v1/models").status_code == 200


def test_usage_is_apart(two: Two) -> None:
    """What A used is on A's account alone: the admin sees it there, and B, who may ask for its own usage, finds nothing
    of A's, by A's key neither."""
    two.same("key", "GET", "/v1/usage?key={}", 200)
    own = two.stranger.get("/v1/usage", params={"group_by": "model"}).json()["data"]
    assert "secret" not in {row["model"] for row in own}
    rows = two.server.admin("GET", "usage", params={"tenant": BEARER["B"], "group_by": "model"}).json()["data"]

    assert "secret" not in {row["model"] for row in rows}


def test_no_prefix_of_another_is_found(two: Two) -> None:
    """PC-03: B's first call of a prompt that A has sent twice finds nothing cached; its second does."""
    body = {"model": MODEL, "prompt": list(range(3, 370)) + list(range(3, 136)), "max_tokens": 1}

    def cached(caller: httpx.Client) -> int:
        return int(caller.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(two.owner), cached(two.owner)] == [0, 496]
    assert [cached(two.stranger), cached(two.stranger)] == [0, 496]
