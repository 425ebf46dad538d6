"""Traps of the wire that have no other home: what SDKs make of our answers, counted by calls."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from engine.protocol import Refused
from gateway import exchange
from tests.gateway.live import ADMIN_KEY, Live, serve
from tests.gateway.scripted import Script, chat, error_of, stream_of
from tests.services import RedisServer

PATH = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: Any = [{"role": "user", "content": "hi"}]


def lists_of_objects(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = []
    if isinstance(value, list):
        found = [(path, entry) for entry in value if isinstance(entry, dict)]
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [entry for name, part in parts for entry in lists_of_objects(part, f"{path}.{name}")]


async def test_lists_in_deltas_have_indices(server: Live) -> None:
    """T16: the SDK's accumulator fails on a list of objects without `index` anywhere in a delta: there is none, with
    every extra switched on."""
    client = await server.http(await server.key("acme"))
    body = chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True, stream_options={"include_usage": True})

    for chunk in await stream_of(client, PATH, body):
        for choice in chunk["choices"]:
            assert all("index" in entry for _, entry in lists_of_objects(choice["delta"]))
    sdk = await server.openai(await server.key("acme"))
    async with sdk.chat.completions.stream(model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2) as stream:
        async for _ in stream:
            pass


async def counting(server: Live, key: str) -> tuple[AsyncOpenAI, list[str]]:
    """An SDK client that tries again twice, and the paths that it called."""
    http, calls = DefaultAsyncHttpxClient(verify=False), []

    async def count(request: Any) -> None:
        calls.append(request.url.path)

    http.event_hooks = {"request": [count]}
    return await server.openai(key, max_retries=2, http_client=http), calls


async def test_a_wait_is_told_as_it_is(server: Live) -> None:
    """T25, T26: the SDK comes again after the milliseconds that we name, and does not try at all when we name five
    minutes: the header is the truth, also when it is long."""
    script = Script(error=Refused("queue_full", "full", 0.02)).install(server)
    client, calls = await counting(server, await server.key("acme"))

    with pytest.raises(openai.InternalServerError) as short:
        await client.chat.completions.create(model="tiny", messages=HELLO)
    assert (short.value.status_code, len(calls)) == (503, 3)
    assert (short.value.response.headers["retry-after"], short.value.response.headers["retry-after-ms"]) == ("1", "20")

    calls.clear()
    script.error = Refused("queue_full", "full", 300.0)
    with pytest.raises(openai.InternalServerError) as long:
        await client.chat.completions.create(model="tiny", messages=HELLO)
    assert long.value.response.headers["retry-after"] == "300"
    assert len(calls) == 1


async def test_what_can_never_pass_is_asked_once(server: Live) -> None:
    """T27, T28: a 429 that waiting can't help, and every 409 of administration, say x-should-retry: false, and the SDK
    obeys: it calls once."""
    key = await server.key("tiny-window")
    admin = await server.http()
    await admin.patch("/admin/v1/tenants/tiny-window", json={"limits": {"tokens_per_minute": 20}})
    client, calls = await counting(server, key)

    with pytest.raises(openai.RateLimitError) as refused:
        await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100)

    assert refused.value.code == "rate_limit_exceeded"
    assert "retry-after" not in refused.value.response.headers
    assert len(calls) == 1
    http, calls = await counting(server, ADMIN_KEY)
    made = await admin.post("/admin/v1/plans", json={"id": "twice"})
    assert made.status_code == 201
    await admin.patch("/admin/v1/tenants/tiny-window", json={"plan": "twice"})
    conflicts: list[tuple[Any, str, dict[str, Any]]] = [
        (http.post, "/tenants", {"id": "tiny-window"}), (http.post, "/plans", {"id": "twice"}),
        (http.delete, "/plans/twice", {}), (http.delete, "/admin-keys/settings", {}),
    ]  # fmt: skip
    for call, path, body in conflicts:
        calls.clear()
        with pytest.raises(openai.ConflictError):
            await call(f"{server.url}/admin/v1{path}", body=body, cast_to=object)
        assert len(calls) == 1, path


async def test_a_fault_after_the_answer_was_made_is_no_500(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, own_redis: RedisServer
) -> None:
    """T29: the store goes away while the engine works: the client gets its answer, once, and nothing makes it try
    again; it is billed once, when the store is back."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, own_redis.url) as live:
        script = Script(["a b c"], gate=asyncio.Event()).install(live)
        client, calls = await counting(live, await live.key("acme"))
        task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO))
        await script.started.wait()
        own_redis.signal(signal.SIGSTOP)
        assert script.gate is not None
        script.gate.set()

        answer = await task
        own_redis.signal(signal.SIGCONT)

        assert answer.choices[0].message.content == "a b c"
        assert calls == [PATH]
        assert answer.usage is not None
        admin = await live.http()
        for _ in range(200):
            rows = (await admin.get("/admin/v1/usage?tenant=acme")).json()["data"]
            if rows and rows[0]["num_requests"]:
                break
            await asyncio.sleep(0.05)
        assert (rows[0]["num_requests"], rows[0]["total_tokens"]) == (1, answer.usage.total_tokens)


async def test_a_response_that_could_not_be_stored(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T29: the store stays away while a response was made, which the client could not continue: 503 that no SDK tries
    again by itself, for it would be billed again; a stream ends with response.failed. Each is billed once."""
    monkeypatch.setattr(exchange, "KEEP_S", 0.5)
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, own_redis.url) as live:
        client, calls = await counting(live, await live.key("acme"))
        for stream in (False, True):
            gate = asyncio.Event()
            script = Script(["a b c"], gate=gate).install(live)
            calls.clear()
            asked: Any = client.responses.create(model="tiny", input="hi", stream=stream)  # type: ignore[call-overload]
            task = asyncio.ensure_future(asked)
            await script.started.wait()
            events = await task if stream else None
            own_redis.signal(signal.SIGSTOP)
            gate.set()
            if events is None:
                with pytest.raises(openai.InternalServerError) as lost:
                    await task
                assert (lost.value.status_code, lost.value.code) == (503, "response_not_stored")
                assert lost.value.response.headers["x-should-retry"] == "false"
            else:
                last = [event async for event in events][-1]
                assert (last.type, last.response.status) == ("response.failed", "failed")
                assert last.response.output_text == "a b c"
            own_redis.signal(signal.SIGCONT)
            assert calls == ["/v1/responses"]
            live.reset()
        admin = await live.http()
        rows: list[dict[str, Any]] = []
        for _ in range(400):
            answer = await admin.get("/admin/v1/usage/entries?tenant=acme")
            rows = answer.json()["data"] if answer.status_code == 200 else []
            if len(rows) == 2:
                break
            await asyncio.sleep(0.05)
        assert [row["completion_tokens"] for row in rows] == [len(live.tokenizer.encode("a b c")) + 1] * 2


async def test_cut_answers_say_so(server: Live) -> None:
    """T36: an answer that max_tokens cut has finish_reason length, in chats and completions, plain and streamed."""
    Script(["the quick brown fox"]).install(server)
    client = await server.http(await server.key("acme"))

    for path, body in (
        (PATH, chat(max_tokens=2)),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}),
    ):
        plain = (await client.post(path, json=body)).json()
        chunks = await stream_of(client, path, body)
        assert plain["choices"][0]["finish_reason"] == "length"
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ("chat_template", (422, "chat_template_invalid")),
        ("tokenizer_config", (400, "unknown_parameter")),
        ("tokenizer.json", (400, "unknown_parameter")),
        ("adapter_model.bin", (400, "unknown_parameter")),
    ],
)
async def test_an_adapter_with_a_broken_template(
    server: Live, tiny_lora: Path, part: str, refusal: tuple[int, str]
) -> None:
    """CH-11: an adapter's own template that can't be rendered, and files that mean nothing here, are refused by name at
    the upload rather than left out; the adapter's name stays free."""
    files: dict[str, Any] = {
        "name": (None, b"own-template"),
        "config": ("c", (tiny_lora / "adapter_config.json").read_bytes()),
        part: ("t", b"{{ 1 / 0 }}"),
        "weights": ("w", (tiny_lora / "adapter_model.safetensors").read_bytes()),
    }
    await server.key("acme")
    admin = await server.http()

    answer = await admin.post("/admin/v1/tenants/acme/adapters", files=files)

    assert (answer.status_code, error_of(answer)["code"]) == refusal, answer.text
    assert (await admin.get("/admin/v1/tenants/acme/adapters")).json()["data"] == []
