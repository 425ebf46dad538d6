"""What a version brings along: its template, its defaults, its generation config; and who goes first."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.spec import AdapterInvalid
from adapters.storage import MAX_COMPANION_BYTES, DirectoryStore
from gateway.companions import DEFAULTS_FILE, GENERATION_FILE, TEMPLATE_FILE, parse_companions
from tests.gateway.live import Live
from tests.gateway.scripted import chat, error_of
from tests.gateway.test_adapters_api import ACME, adapters, admin, error, parts

__all__ = ["adapters", "admin"]
CHAT = "/v1/chat/completions"
SHOUT = """\
{% for m in messages %}[{{ m.role }}] {{ m.content | upper }}
{% endfor %}{% if add_generation_prompt %}>{% endif %}"""


async def put(
    admin: httpx.AsyncClient, files: tuple[bytes, bytes], name: str = "pirate", method: str = "POST", **companions: Any
) -> httpx.Response:
    texts = {part: value if isinstance(value, str | bytes) else json.dumps(value) for part, value in companions.items()}
    body = parts(files, name if method == "POST" else None) | {part: (None, text) for part, text in texts.items()}
    return await admin.request(method, ACME if method == "POST" else f"{ACME}/{name}", files=body)


def last(live: Live) -> Any:
    return live.engine.requests[-1]


async def test_defaults_fill_what_a_request_leaves_open(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any]
) -> None:
    """Request before defaults before generation_config.json before the base, field by field, on all three surfaces; end
    tokens are added; the answer of Responses shows what was used."""
    made = await put(
        admin, adapters[0],
        defaults={"system_prompt": "You are a pirate.", "temperature": 0.25, "max_tokens": 33, "stop": ["Arr"]},
        generation_config={"temperature": 0.9, "top_k": 7, "top_p": 0.5, "max_new_tokens": 99, "eos_token_id": [2, 5],
                           "transformers_version": "5", "penalty_alpha": 0.6},
    )  # fmt: skip
    assert made.status_code == 201, made.text
    assert made.json()["companions"] == [DEFAULTS_FILE, GENERATION_FILE]
    assert made.json()["warnings"] == [f"{GENERATION_FILE}: not used: penalty_alpha"]
    caller = await live.http(await live.key("acme"))
    for path, body in ((CHAT, chat()), ("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})):
        answer = await caller.post(path, json=body | {"model": "pirate"})
        assert answer.status_code == 200, answer.text
        params = last(live).params
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 7, 0.5, 33), path
        assert (params.stop, params.stop_token_ids) == (["Arr"], [2, 5])
        if path == "/v1/responses":
            assert (answer.json()["temperature"], answer.json()["max_output_tokens"]) == (0.25, 33)
    assert ["You are a pirate." in prompt for prompt in live.prompts()] == [True, False, True]

    own = {"temperature": 0.0, "top_k": 0, "stop": [], "max_tokens": 5, "stop_token_ids": [9], "model": "pirate"}
    messages = [{"role": "system", "content": "Be plain."}, {"role": "user", "content": "hi"}]
    await caller.post(CHAT, json=chat(messages=messages, **own))
    params = last(live).params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 0, 0.5, 5)
    assert (params.stop, params.stop_token_ids) == ([], [9, 2, 5])
    assert "pirate" not in live.prompts()[-1]
    await caller.post("/v1/responses", json={"model": "pirate", "input": "hi", "instructions": "Be plain."})
    assert "pirate" not in live.prompts()[-1]
    await caller.post(CHAT, json=chat(max_completion_tokens=6) | {"model": "pirate"})
    assert last(live).params.max_tokens == 6
    await caller.post(CHAT, json=chat(ignore_eos=True) | {"model": "pirate"})
    assert last(live).params.stop_token_ids is None
    await caller.post(CHAT, json=chat() | {"model": "tiny"})
    assert (last(live).params.temperature, last(live).params.stop) == (1.0, None)


async def test_a_default_limit_gives_way(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """max_tokens of the defaults is cut to what the context has room for; one of the request is 400 as ever."""
    await put(admin, adapters[0], defaults={"max_tokens": 100_000})
    caller = await live.http(await live.key("acme"))
    assert (await caller.post(CHAT, json=chat() | {"model": "pirate"})).status_code == 200
    assert 0 < last(live).params.max_tokens < 512
    refused = await caller.post(CHAT, json=chat(max_tokens=100_000) | {"model": "pirate"})
    assert error_of(refused)["code"] == "context_length_exceeded"


async def test_its_own_template(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """A version's template is used for it alone, wherever a conversation is read: chats, Responses, truncation,
    tokenize, input_tokens; what people write never becomes a control token in it; raw prompts don't know it."""
    await put(admin, adapters[0], chat_template=SHOUT, defaults={"system_prompt": "sys"})
    await put(admin, adapters[1], name="plain")
    caller = await live.http(await live.key("acme"))
    body = {"model": "pirate", "input": "hello", "truncation": "auto"}
    await caller.post(CHAT, json=chat("hello") | {"model": "pirate"})
    await caller.post("/v1/responses", json=body)
    expected = "[system] SYS\n[user] HELLO\n>"
    assert live.prompts() == [expected] * 2
    counted = (await caller.post("/v1/responses/input_tokens", json={"model": "pirate", "input": "hello"})).json()
    told = (await caller.post("/tokenize", json={"model": "pirate", "messages": chat("hello")["messages"]})).json()
    assert counted["input_tokens"] == told["count"] == len(last(live).prompt)
    assert told["tokens"] == last(live).prompt

    await caller.post(CHAT, json=chat("<|im_end|>") | {"model": "pirate"})
    assert 2 not in last(live).prompt
    for model in ("plain", "tiny"):
        await caller.post(CHAT, json=chat("hello") | {"model": model})
        assert "HELLO" not in live.prompts()[-1]
    await caller.post("/v1/completions", json={"model": "pirate", "prompt": "hello"})
    assert live.prompts()[-1] == "hello"


PICKY = """\
{% for m in messages %}{% if m.role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{% if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("Roles must alternate") }}{% endif %}
{{ m.role }}: {{ m.content }}
{% endfor %}"""


async def test_a_template_that_refuses(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """CH-01: 400 with the template's own words, about the field that holds the messages, on every endpoint, streamed or
    not; nothing is generated or charged, and what it accepts is answered."""
    await put(admin, adapters[0], chat_template=PICKY)
    await admin.patch("/admin/v1/tenants/acme", json={"limits": {"requests_per_minute": 1}})
    caller = await live.http(await live.key("acme"))
    system, user, assistant = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))
    developer = {"role": "developer", "content": "x"}

    for said, told in (
        ([system, user], "System role not supported"), ([developer, user], "System role not supported"),
        ([user, user], "Roles must alternate"), ([assistant, user], "Roles must alternate"),
    ):  # fmt: skip
        for path, param, more in (
            (CHAT, "messages", {}), (CHAT, "messages", {"stream": True}), ("/tokenize", "messages", {}),
            ("/v1/responses", "input", {}), ("/v1/responses", "input", {"stream": True}),
            ("/v1/responses", "input", {"truncation": "auto"}), ("/v1/responses/input_tokens", "input", {}),
        ):  # fmt: skip
            refused = await caller.post(path, json={"model": "pirate", param: said, **more})
            assert refused.status_code == 400, (path, refused.text)
            assert (error_of(refused)["param"], told in error_of(refused)["message"]) == (param, True), (path, said)
    assert live.engine.requests == []
    assert (await caller.post(CHAT, json={"model": "pirate", "messages": [user, assistant, user]})).status_code == 200


async def test_rolled_back_with_the_version(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Companions belong to the version and to its digest: equal weights with other defaults are another version, and a
    rollback brings the old ones back; a canary has its own."""
    first = (await put(admin, adapters[0], defaults={"temperature": 0.1})).json()
    second = (await put(admin, adapters[0], method="PUT", defaults={"temperature": 0.2})).json()
    third = (await put(admin, adapters[0], method="PUT")).json()
    assert len({made["digest"] for made in (first, second, third)}) == 3
    caller = await live.http(await live.key("acme"))

    async def temperature(**fields: Any) -> float:
        await caller.post(CHAT, json=chat(**fields) | {"model": "pirate"})
        return float(last(live).params.temperature)

    assert await temperature() == 1.0
    await admin.post(f"{ACME}/pirate/rollback")
    assert await temperature() == 0.2
    await admin.post(f"{ACME}/pirate/rollback")
    assert await temperature() == 0.1
    await admin.post(f"{ACME}/pirate/activate", json={"version": 2, "percent": 50})
    assert {await temperature(user=f"u{i}") for i in range(20)} == {0.1, 0.2}


REFUSED: list[tuple[str, Any, str, str]] = [
    ("defaults", {"temprature": 1}, "defaults_invalid", "temprature"),
    ("defaults", {"temperature": "1"}, "defaults_invalid", "temperature"),
    ("defaults", {"temperature": 3}, "defaults_invalid", "temperature"),
    ("defaults", {"max_tokens": 0}, "defaults_invalid", "max_tokens"),
    ("defaults", {"max_tokens": True}, "defaults_invalid", "max_tokens"),
    ("defaults", {"stop": [""]}, "defaults_invalid", "stop"),
    ("defaults", {"system_prompt": ""}, "defaults_invalid", "system_prompt"),
    ("defaults", "[]", "defaults_invalid", DEFAULTS_FILE),
    ("defaults", '{"seed": 1, "seed": 2}', "defaults_invalid", DEFAULTS_FILE),
    ("defaults", '{"temperature": NaN}', "defaults_invalid", DEFAULTS_FILE),
    ("defaults", b"\xff", "defaults_invalid", DEFAULTS_FILE),
    ("generation_config", {"top_k": 1.5}, "generation_config_invalid", "top_k"),
    ("generation_config", {"max_new_tokens": -1}, "generation_config_invalid", "max_new_tokens"),
    ("generation_config", {"eos_token_id": 10**9}, "generation_config_invalid", "eos_token_id"),
    ("generation_config", {"do_sample": 1}, "generation_config_invalid", "do_sample"),
    ("chat_template", "{% for %}", "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", "{{ messages[0].nope.nope }}", "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
     "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", "{{ 'x' * 10**10 }}", "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", b"\xff", "chat_template_invalid", TEMPLATE_FILE),
    ("chat_template", " ", "chat_template_invalid", TEMPLATE_FILE),
]  # fmt: skip


@pytest.mark.parametrize(("part", "content", "code", "param"), REFUSED)
async def test_refused_whole(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any], part: str, content: Any, code: str, param: str
) -> None:
    """422 with a stable code that names the key; nothing is kept, and the gateway goes on."""
    refused = error(await put(admin, adapters[0], **{part: content}), 422)
    assert (refused["code"], refused["param"]) == (code, param)
    assert (await admin.get(ACME)).json()["data"] == []
    assert [path for path in (live.settings.store_dir / "store").iterdir()] == []
    assert (await admin.get("/livez")).status_code == 200


async def test_too_large(admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """Each companion has its limit."""
    large = "x" * (MAX_COMPANION_BYTES + 1)
    for part in ("chat_template", "defaults", "generation_config"):
        assert error(await put(admin, adapters[0], **{part: large}), 413)["param"] == part


async def test_a_damaged_companion_is_not_used(live: Live, admin: httpx.AsyncClient, adapters: list[Any]) -> None:
    """A stored file that changed is told in the status; the version is not answered by another system prompt, nor by
    the base; other adapters go on."""
    made = (await put(admin, adapters[0], defaults={"system_prompt": "good"})).json()
    await put(admin, adapters[1], name="other", defaults={"system_prompt": "fine"})
    file = live.settings.store_dir / "store" / made["digest"].removeprefix("sha256:") / DEFAULTS_FILE
    _overwrite(file, b'{"system_prompt": "evil"}')
    caller = await live.http(await live.key("acme"))
    refused = await caller.post(CHAT, json=chat() | {"model": "pirate"})
    assert (refused.status_code, error_of(refused)["code"]) == (500, "adapter_invalid")
    assert live.engine.requests == []
    assert (await admin.get(f"{ACME}/pirate")).json()["status"] == "failed"
    assert (await caller.post(CHAT, json=chat() | {"model": "other"})).status_code == 200


def _overwrite(file: Path, data: bytes) -> None:
    file.chmod(0o600)
    file.write_bytes(data)


async def test_read_once(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked at the first use, not at every request; a plain adapter never asks."""
    reads: list[str] = []
    read = DirectoryStore.read

    def counted(store: DirectoryStore, digest: str, name: str) -> bytes | None:
        reads.append(name)
        return read(store, digest, name)

    monkeypatch.setattr(DirectoryStore, "read", counted)
    await put(admin, adapters[0], defaults={"temperature": 0.5})
    await put(admin, adapters[1], name="plain")
    caller = await live.http(await live.key("acme"))
    for _ in range(3):
        for model in ("pirate", "plain", "tiny"):
            assert (await caller.post(CHAT, json=chat() | {"model": model})).status_code == 200
    assert reads == [DEFAULTS_FILE]


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["temperature", "top_k", "stop", "eos_token_id", "max_new_tokens", "system_prompt", "x"]),
        inner, max_size=4), max_leaves=8).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    """Whatever is sent as a companion is a Profile or AdapterInvalid, never another fault."""
    for name in (DEFAULTS_FILE, GENERATION_FILE, TEMPLATE_FILE):
        with suppress(AdapterInvalid):
            parse_companions({name: data}, 512)
