"""Clients that leave, engines that fail in mid-stream, waits that last: nothing is left behind, nobody is misled."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

import gateway.sse
from engine.protocol import Broken
from tests.gateway.live import Live
from tests.gateway.scripted import Script, chat, frames_of
from tests.waiting import until

PATH = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")
SOON_S = 1.0
"""So soon a client that has left holds nothing any more."""
LONG = " ".join(["the quick brown fox"] * 20)
BODIES: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    PATH: (chat(), b'"role":"assistant"', b'"content":"the'),
    "/v1/completions": ({"model": "tiny", "prompt": "hi", "max_tokens": 100}, b"HTTP/1.1 200", b'"text":"the'),
    "/v1/responses": ({"model": "tiny", "input": "hi"}, b"response.created", b'"delta":"the'),
}
"""What is asked, what comes before the first token of its stream, and what with it."""
everywhere = pytest.mark.parametrize("path", BODIES)


async def single(server: Live, tenant: str) -> str:
    """A key of a tenant with one place: a lease that is not given back shows at the next call."""
    key = await server.key(tenant)
    await (await server.http()).patch(f"/admin/v1/tenants/{tenant}", json={"limits": {"concurrency": 1}})
    return key


async def connect(server: Live, key: str, body: dict[str, Any], path: str = PATH) -> tuple[Any, asyncio.StreamWriter]:
    """A raw connection with the request sent."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    await writer.drain()
    return reader, writer


async def place_is_free(server: Live, key: str) -> None:
    """Soon, long before the lease would end by itself, a request of a tenant with one place is admitted."""
    client = await server.http(key)
    deadline = time.monotonic() + SOON_S
    while (await client.post(PATH, json=chat())).status_code != 200:
        assert time.monotonic() < deadline, "the lease was not given back"
        await asyncio.sleep(0.02)


async def row_of(server: Live, tenant: str) -> dict[str, Any]:
    """The tenant's sums, once there is a row."""
    admin = await server.http()
    for _ in range(200):
        rows = (await admin.get(f"/admin/v1/usage?tenant={tenant}")).json()["data"]
        if rows and rows[0]["num_requests"]:
            return dict(rows[0])
        await asyncio.sleep(0.02)
    raise AssertionError("no usage row")


@pytest.mark.parametrize("stream", [False, True])
@everywhere
async def test_gone_while_the_engine_has_not_accepted(server: Live, stream: bool, path: str) -> None:
    """T49, KV-01: a client that leaves while its request is queued: the request is withdrawn at once, the lease
    is free, nothing is billed for output."""
    script = Script(accept=asyncio.Event()).install(server)
    tenant = f"queued-{stream}-{len(path)}"
    key = await single(server, tenant)
    _, writer = await connect(server, key, BODIES[path][0] | {"stream": stream}, path)
    await script.started.wait()

    writer.close()

    await until(lambda: script.aborted_waiting == 1, SOON_S)
    script.accept = None
    assert (await row_of(server, tenant))["total_tokens"] == 0
    await place_is_free(server, key)


@pytest.mark.parametrize("stream", [False, True])
@everywhere
async def test_gone_before_the_first_token(server: Live, stream: bool, path: str) -> None:
    """T49, KV-01: accepted but silent (an adapter loads): closed at once, and once."""
    script = Script(gate=asyncio.Event()).install(server)
    key = await single(server, f"silent-{stream}-{len(path)}")
    body, head, _ = BODIES[path]
    reader, writer = await connect(server, key, body | {"stream": stream}, path)
    await until(lambda: bool(script.generations))
    if stream:
        await reader.readuntil(head)

    writer.close()

    await until(lambda: script.generations[0].num_closed == 1, SOON_S)
    script.gate = None
    await place_is_free(server, key)
    assert script.generations[0].num_closed == 1


@pytest.mark.parametrize("stream", [False, True])
@everywhere
async def test_gone_in_mid_stream(server: Live, stream: bool, path: str) -> None:
    """T49, QB-03, KV-01: what was made until then is billed, the rest is never asked for; the lease is free."""
    gate = asyncio.Event()
    script = Script([LONG], gate=gate).install(server)
    tenant = f"midway-{stream}-{len(path)}"
    key = await single(server, tenant)
    body, _, first = BODIES[path]
    reader, writer = await connect(server, key, body | {"stream": stream}, path)
    await until(lambda: bool(script.generations))
    generation = script.generations[0]
    inner = generation.__class__.__anext__

    async def three_then_wait(self: Any) -> Any:
        if self._position == 3:
            gate.clear()
        return await inner(self)

    generation.__class__ = type("Slow", (generation.__class__,), {"__anext__": three_then_wait})
    gate.set()
    await until(lambda: not gate.is_set())
    if stream:
        await reader.readuntil(first)

    writer.close()

    await until(lambda: generation.num_closed == 1, SOON_S)
    script.gate = None
    row = await row_of(server, tenant)
    assert row["completion_tokens"] == 3
    assert row["prompt_tokens"] == len(script.requests[0].prompt)
    await place_is_free(server, key)


async def test_many_leave_at_once(server: Live) -> None:
    """KV-01: forty clients that leave at different moments leave no request, no lease and no task behind."""
    script = Script([LONG], gate=asyncio.Event()).install(server)
    key = await server.key("crowd")
    await (await server.http()).patch("/admin/v1/tenants/crowd", json={"limits": {"concurrency": 40}})
    pairs = [await connect(server, key, chat(stream=i % 2 == 0)) for i in range(40)]
    await until(lambda: len(script.generations) == 40)
    running = len(asyncio.all_tasks())

    for _, writer in pairs:
        writer.close()

    await until(lambda: all(generation.num_closed == 1 for generation in script.generations), 3 * SOON_S)
    script.gate = None
    client = await server.http(key)
    answers = await asyncio.gather(*(client.post(PATH, json=chat()) for _ in range(40)))
    assert 429 not in {answer.status_code for answer in answers}
    await until(lambda: len(asyncio.all_tasks()) < running - 40)


async def test_a_whole_answer_aborts_nothing(server: Live) -> None:
    """KV-01: a generation that ended by itself is finished when it is closed."""
    script = Script().install(server)
    client = await server.http(await server.key("calm"))

    for stream in (True, False):
        assert (await client.post(PATH, json=chat(stream=stream))).status_code == 200

    assert [(g.is_finished, g.num_closed) for g in script.generations] == [(True, 1)] * 2


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_an_engine_that_dies_in_mid_stream(server: Live, path: str) -> None:
    """T22, T23, ST-06, ST-07: the stream ends with an error event, an object and not a string, without [DONE] and
    without a finish_reason; the SDK raises APIError; what was made is billed, the lease is free."""
    script = Script([LONG], fail_after=3, error=Broken("engine_error", "the engine has restarted")).install(server)
    tenant = f"dying-{len(path)}"
    key = await single(server, tenant)
    client = await server.http(key)

    answer = await client.post(path, json=BODIES[path][0] | {"stream": True})
    sdk = await server.openai(key)
    texts: list[str] = []

    async def read() -> None:
        if path == PATH:
            messages: Any = [{"role": "user", "content": "x"}]
            async for chunk in await sdk.chat.completions.create(model="tiny", messages=messages, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
        else:
            async for part in await sdk.completions.create(model="tiny", prompt="x", stream=True):
                texts.append(part.choices[0].text)

    with pytest.raises(openai.APIError) as caught:
        await read()

    assert answer.status_code == 200
    frames = frames_of(answer.content)
    error = json.loads(frames[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert "[DONE]" not in frames
    assert not any('"finish_reason":"' in frame for frame in frames)
    assert "".join(texts) == server.tokenizer.decode(server.tokenizer.encode(LONG)[:3])
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.message == "the engine has restarted"
    script.error = None
    await place_is_free(server, key)
    admin = await server.http()
    rows: list[dict[str, Any]] = []
    for _ in range(200):
        rows = (await admin.get(f"/admin/v1/usage/entries?tenant={tenant}")).json()["data"]
        if len(rows) >= 3:
            break
        await asyncio.sleep(0.02)
    assert [(row["status"], row["completion_tokens"]) for row in rows[-2:]] == [("error", 3)] * 2


async def test_an_engine_that_dies_during_a_plain_answer(server: Live) -> None:
    """ST-07: then the answer is an error, not half a text."""
    Script([LONG], fail_after=3, error=Broken("engine_error", "gone")).install(server)
    client = await server.http(await server.key("dying-plain"))

    answer = await client.post(PATH, json=chat())

    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "gone"


async def test_an_adapter_that_does_not_load_in_time(server: Live) -> None:
    """A plain call is 503 model_loading with Retry-After; a stream, which has begun, tells it in an error event."""
    Script([LONG], fail_after=0, error=Broken("adapter_loading", "not loaded within 10 s", 1.0)).install(server)
    client = await server.http(await server.key("loading"))

    plain = await client.post(PATH, json=chat())
    frames = frames_of((await client.post(PATH, json=chat(stream=True))).content)

    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "model_loading")
    assert plain.headers["retry-after"] == "1"
    assert json.loads(frames[-1])["error"]["code"] == "model_loading"


async def test_a_request_that_does_not_end_in_time(server: Live) -> None:
    """The engine's deadline, whenever it falls: a plain call is 504 timeout, also after tokens came; a stream, which
    has begun, tells it in an error event."""
    client = await server.http(await server.key("slow"))
    for fail_after in (0, 2):
        Script([LONG], fail_after=fail_after, error=Broken("deadline", "not finished within 600 s")).install(server)
        plain = await client.post(PATH, json=chat())
        frames = frames_of((await client.post(PATH, json=chat(stream=True))).content)

        assert (plain.status_code, plain.json()["error"]["code"]) == (504, "timeout")
        assert json.loads(frames[-1])["error"]["code"] == "timeout"


async def test_an_unexpected_fault_in_mid_stream(server: Live) -> None:
    """ST-07: a fault of our own is an error event too, and tells nothing of its inside."""
    script = Script([LONG]).install(server)
    script.fail_after, script.error = 2, ZeroDivisionError("secret")  # type: ignore[assignment]
    client = await server.http(await server.key("faulty"))

    answer = await client.post(PATH, json=chat(stream=True))

    frames = frames_of(answer.content)
    assert "secret" not in answer.text
    assert json.loads(frames[-1])["error"]["type"] == "server_error"


async def test_an_engine_that_ends_too_early(server: Live) -> None:
    """ST-06: a generation that stops without a finish is an error, never a silent end."""
    script = Script([LONG], gate=asyncio.Event()).install(server)
    client = await server.http(await server.key("early"))
    task = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
    await until(lambda: bool(script.generations))
    del script.generations[0]._chunks[5:]
    assert script.gate is not None
    script.gate.set()

    frames = frames_of((await task).content)

    assert "error" in json.loads(frames[-1])


@everywhere
async def test_waiting_is_told_by_comments(server: Live, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """T10, T11, ST-13: while nothing comes, comment lines keep the connection alive, and the client does not notice;
    while tokens flow there are none."""
    monkeypatch.setattr(gateway.sse.EventStream.__init__, "__kwdefaults__", {
        **(gateway.sse.EventStream.__init__.__kwdefaults__ or {}), "keep_alive_s": 0.05,
    })  # fmt: skip
    gate = asyncio.Event()
    script = Script(["a b c"], gate=gate).install(server)
    key = await server.key("patient")
    sdk = await server.openai(key)
    client = await server.http(key)

    async def read() -> str:
        if path == "/v1/responses":
            async with sdk.responses.stream(model="tiny", input="x") as events:
                return (await events.get_final_response()).output_text
        if path == "/v1/completions":
            parts = await sdk.completions.create(model="tiny", prompt="x", stream=True)
            return "".join([part.choices[0].text async for part in parts])
        stream = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    body = BODIES[path][0] | {"stream": True}
    raw, text = asyncio.create_task(client.post(path, json=body)), asyncio.create_task(read())
    started = time.monotonic()
    await until(lambda: len(script.generations) == 2)
    await asyncio.sleep(0.4)
    gate.set()

    received = (await raw).content
    assert await text == "a b c"
    assert 3 <= received.count(b": ping\n\n") <= (time.monotonic() - started) / 0.05 + 1
    assert b"\nid:" not in received
    if path != "/v1/responses":
        assert frames_of(received)[-1] == "[DONE]"
    quick = (await client.post(path, json=body)).content
    assert b"ping" not in quick


async def test_a_client_that_reads_nothing(server: Live) -> None:
    """T49: a connection that stays open but is never read holds up nobody else, and its end is noticed."""
    script = Script([LONG * 3]).install(server)
    key = await single(server, "deaf")
    _, writer = await connect(server, key, chat(stream=True, max_tokens=300))
    await until(lambda: bool(script.generations))

    other = await (await server.http(await server.key("hears"))).post(PATH, json=chat(stream=True, max_tokens=50))
    writer.close()

    assert frames_of(other.content)[-1] == "[DONE]"
    await place_is_free(server, key)


async def test_a_choice_that_a_stop_string_ended_costs_no_more(server: Live) -> None:
    """Only the text layer sees stop strings: it tells the engine which choice has ended, unless all have."""
    script = Script(texts=["one END two three", "one two three four END"]).install(server)
    client = await server.http(await server.key("acme"))

    answer = await client.post("/v1/chat/completions", json=chat(n=2, stop="END", max_tokens=100))

    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["stop", "stop"]
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["one ", "one two three four "]
    assert script.generations[0].stopped == [0]
    assert script.generations[0].num_closed
