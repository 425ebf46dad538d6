"""Errors on the wire: one envelope everywhere, quick answers to broken input, every field known or refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from engine.protocol import Broken, Refused
from gateway.app import ROUTERS
from gateway.auth import PUBLIC, Requires
from gateway.errors import to_api_error
from tests.gateway.live import ADMIN_KEY, Live
from tests.gateway.scripted import Script, chat, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/chat/completions"


BROKEN = {
    "unfinished": b"{x",
    "not utf-8": b"\xff\xfe",
    "utf-16": '{"model":"tiny"}'.encode("utf-16"),
    "bad utf-8 inside": b'{"model":"tiny","messages":[{"role":"user","content":"\xc3\x28"}]}',
    "null": b"null",
    "list": b"[]",
    "string": b'"s"',
    "number": b"1",
    "twice": b'{"model":"tiny","model":"other","messages":[]}',
    "twice, escaped": b'{"model":"tiny","mod\\u0065l":"other","messages":[]}',
    "twice beside a quotation": b'{"model":"tiny","model" :"other","messages":[{"role":"user","content":"\\": \\":"}]}',
    "twice inside": b'{"model":"tiny","messages":[{"role":"user","role":"system","content":"x"}]}',
    "nan": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "infinity": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    "surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "surrogate model": b'{"model":"\\udc00","messages":[{"role":"user","content":"x"}]}',
    "deep": b'{"a":' + b"[" * 100_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "deep, but not many": b'{"a":' + b"[" * 15_000,
    "deep, but not many, and closed": b"[" * 9_000 + b"NaN" + b"]" * 9_000,
    "deep and twice": b'{"a":1,"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "huge number": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5000 + b"}",
    "trailing": b"{} x",
}


JSON = {"content-type": "application/json"}
SOUND = {"null", "list", "string", "number"}
"""Of BROKEN, what is JSON: not everywhere must a body be an object, or there at all."""


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses", "/tokenize", "/admin/v1/tenants"])
async def test_broken_bodies(server: Live, path: str) -> None:
    """HT-01, HT-02, T1: whatever is wrong with a body, the answer is 400 in the envelope; the next call works and no
    lease is left."""
    client = await server.http(ADMIN_KEY if path.startswith("/admin") else await server.key("broken"))

    for name, raw in (BROKEN | {"empty": b""}).items():
        answer = await client.post(path, content=raw, headers=JSON)
        assert answer.status_code == 400, (name, answer.text)
        error_of(answer)

    assert (await (await server.http(await server.key("broken"))).post(PATH, json=chat())).status_code == 200
    assert await server.num_leases("broken") == 0


async def test_broken_bodies_everywhere(server: Live) -> None:
    """HT-01: no route that takes a body has another idea of what JSON is, the admin's included."""
    tenant, admin = await server.http(await server.key("acme", "inference", "adapters:write")), await server.http()
    tried = 0
    for route in routes():
        path = re.sub(r"{[^}]*}", "x", route.path)
        for method in sorted((route.methods or set()) & {"POST", "PUT", "PATCH", "DELETE"}):
            for name in sorted(BROKEN.keys() - SOUND):
                client = admin if path.startswith("/admin") else tenant
                answer = await client.request(method, path, content=BROKEN[name], headers=JSON)
                assert answer.status_code == 400, (method, path, name, answer.text)
                error_of(answer)
                tried += 1
    assert tried > 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('"temperature":NaN', "temperature"), ('"temperature":Infinity', "temperature"), ('"top_p":NaN', "top_p"),
        ('"top_p":-Infinity', "top_p"), ('"min_p":1e999', "min_p"), ('"logit_bias":{"5":NaN}', "logit_bias"),
        ('"stop":[NaN]', "stop"), ('"n":1,}', None),
    ],
)  # fmt: skip
async def test_numbers_that_json_has_not(server: Live, body: str, param: str | None) -> None:
    """SM-04: NaN and infinities are 400 that names their field, in an answer that is JSON itself."""
    client = await server.http(await server.key("acme"))
    raw = '{"model":"tiny","messages":[{"role":"user","content":"NaN"}],%s}' % body  # noqa: UP031 - full of braces

    answer = await client.post(PATH, content=raw, headers=JSON)

    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_large_bodies(server: Live) -> None:
    """T3: a body above the limit is 413 from its Content-Length, and while it is read when there is none."""
    client = await server.http(await server.key("acme"))

    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 1_000_000

    declared = await client.post(PATH, content=b"{" + b" " * (20 << 20) + b"}")
    streamed = await client.post(PATH, content=endless())

    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"


async def test_framework_errors(server: Live) -> None:
    """T3, T51, HT-08: unknown routes, wrong methods and trailing slashes have the envelope too; nothing redirects."""
    client = await server.http(await server.key("acme"))

    for method, path, status in [
        ("GET", "/nope", 404), ("PUT", "/v1/models", 405), ("GET", "/v1/completions", 405), ("GET", f"{PATH}/", 404),
        ("POST", "//v1/chat/completions", 404), ("OPTIONS", "/v1/models", 405), ("GET", "/V1/models", 404),
        ("DELETE", "/v1/models", 405),
    ]:  # fmt: skip
        answer = await client.request(method, path)
        assert answer.status_code == status, path
        error_of(answer)
    head = await client.head("/v1/models")
    assert head.status_code == 405


async def test_load_balancers_ask_by_head(server: Live) -> None:
    """HEAD of the health routes says what GET says, without body and key; of an engine that is away, too."""
    async with httpx.AsyncClient(base_url=server.url) as client:
        for is_up in (True, False):
            if not is_up:
                server.engine.ready = None
            for path in ("/livez", "/readyz", "/health"):
                head, get = await client.head(path), await client.get(path)
                assert head.status_code == get.status_code == (200 if is_up or path == "/livez" else 503), path
                assert head.content == b""


async def test_the_clients_exceptions(server: Live) -> None:
    """HT-08, T1, T2: openai-python maps our errors to its typed exceptions, with code and param."""
    script = Script().install(server)
    key = await server.key("acme")
    client = await server.openai(key)
    messages: Any = [{"role": "user", "content": "x"}]

    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=messages, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as lost:
        await client.chat.completions.create(model="nope", messages=messages)
    assert lost.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as unknown:
        await (await server.openai("wrong")).chat.completions.create(model="tiny", messages=messages)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        await (await server.openai(ADMIN_KEY)).chat.completions.create(model="tiny", messages=messages)
    script.error = RuntimeError("a fault of ours")  # type: ignore[assignment]
    with pytest.raises(openai.InternalServerError) as ours:
        await client.chat.completions.create(model="tiny", messages=messages)
    assert "fault of ours" not in ours.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0.5}, "top_k"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 1e9}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 10**6}, "n"),
        ({"n": "1"}, "n"), ({"seed": 2**70}, "seed"), ({"seed": 1.5}, "seed"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"), ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"), ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"stream": "yes"}, "stream"), ({"model": 1}, "model"),
        ({"user": 5}, "user"), ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"cache_salt": ""}, "cache_salt"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"), ({"safety_identifier": "x" * 65}, "safety_identifier"),
        ({"request_id": "x" * 513}, "request_id"),
        ({"metadata": {"a": 1}}, "metadata"), ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"), ({"service_tier": "priority"}, "service_tier"),
    ],
)  # fmt: skip
async def test_values_out_of_range(server: Live, fields: dict[str, Any], param: str) -> None:
    """SM-04, T38: 400 that names the parameter; the engine never hears of it."""
    client = await server.http(await server.key("acme"))

    answer = await client.post(PATH, json=chat(**fields))

    assert answer.status_code == 400, answer.text
    assert (error_of(answer)["param"] or "").split(".")[0] == param
    assert not server.engine.requests


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-6}, {"top_k": 10**7}, {"top_k": 0}, {"top_k": -1}, {"temperature": 0}]
)
async def test_odd_values_that_mean_something(server: Live, fields: dict[str, Any]) -> None:
    """SM-04: a tiny temperature is greedy, a top_k above the vocabulary keeps all."""
    client = await server.http(await server.key("acme"))

    assert (await client.post(PATH, json=chat(**fields))).status_code == 200


REFUSED: dict[str, Any] = {
    "priority": 5, "kv_transfer_params": {}, "ec_transfer_params": {}, "vllm_xargs": {"a": 1},
    "chat_template": "{{ 1 }}",
    "structured_outputs": {"json": {}},
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"}, "modalities": ["audio"], "audio": {"voice": "x"}, "store": True,
    "prediction": {"type": "content"}, "web_search_options": {}, "reasoning_effort": "low", "verbosity": "low",
    "bad_words": ["x"], "logprob_token_ids": [1], "documents": [{}], "use_beam_search": True,
    "length_penalty": 2, "truncation_side": "left", "zzz_unknown": 1,
    "api_base": "http://x", "max_token": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_fields_that_are_refused(server: Live, name: str) -> None:
    """What Chorus does not do, what only the gateway may decide, and what nobody knows is 400 by name."""
    client = await server.http(await server.key("acme"))

    answer = await client.post(PATH, json=chat(**{name: REFUSED[name]}))

    assert answer.status_code == 400, answer.text
    assert (error_of(answer)["param"] or "").startswith(name)
    assert not server.engine.requests


async def test_fields_that_ask_for_nothing(server: Live) -> None:
    """SDKs and frameworks send defaults and hints: they are accepted."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))

    answer = await client.post(
        PATH,
        json=chat(
            tools=None, tool_choice="none", response_format={"type": "text"}, modalities=["text"], store=False,
            parallel_tool_calls=True, prompt_cache_key="k", safety_identifier="s", user="u", metadata={"a": "b"},
            service_tier="auto", request_id="mine", session_id="mine", length_penalty=1.0, priority=None, functions=[],
            spaces_between_special_tokens=True, stream=False, stream_options=None, n=None, logit_bias=None,
        ),
    )  # fmt: skip

    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == "default"
    assert script.requests[0].priority == 1


STORED = "/v1/chat/completions/chatcmpl-1"


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", PATH, "store"), ("GET", STORED, "store"), ("POST", STORED, "store"), ("DELETE", STORED, "store"),
        ("GET", f"{STORED}/messages", "store"), ("POST", "/v1/responses/compact", "compact"),
    ],
)  # fmt: skip
async def test_routes_that_are_not_served_yet(server: Live, method: str, path: str, param: str) -> None:
    """Stored chat completions and compaction say so, with `param`, rather than that there is no such URL."""
    client = await server.http(await server.key("acme"))

    answer = await client.request(method, path, json={} if method == "POST" else None)

    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_names_that_no_header_can_carry(server: Live) -> None:
    """HT-03: non-ASCII model names, ids and header bytes never break an answer."""
    client = await server.http(await server.key("acme"))

    name = await client.post(PATH, json={**chat(), "model": "모델-α"})
    header = await client.post(
        PATH, json=chat(user="Zoë 😀"), headers=[(b"x-client-request-id", "Zoë😀".encode()), (b"x-weird", b"\xff\xfe")]
    )
    long = await client.post(PATH, json=chat(), headers={"x-request-id": "i" * 50_000})

    assert (name.status_code, error_of(name)["code"]) == (404, "model_not_found")
    assert "모델-α" in error_of(name)["message"]
    assert header.status_code == 200
    assert long.status_code in (200, 400, 431)
    admin, own = await server.http(), await server.http(await server.key("zoe"))
    names = {"name": "Zoë 😀", "model_names": {"모델-α": "tiny"}, "unknown_fields": "warn"}
    assert (await admin.patch("/admin/v1/tenants/zoe", json=names)).json()["name"] == "Zoë 😀"
    for stream in (False, True):
        answer = await own.post(PATH, json={**chat(stream=stream), "model": "모델-α", "größe 😀": 1})
        assert (answer.status_code, "모델-α" in answer.text) == (200, True)
        assert answer.headers["x-chorus-ignored"].isascii()
    assert [model["id"] for model in (await own.get("/v1/models")).json()["data"]] == ["tiny", "모델-α"]


async def test_headers_of_every_answer(server: Live) -> None:
    """HT-06: every answer has an id of ours and OpenAI's headers; whose key it was is told."""
    client = await server.http(await server.key("acme"))

    ids = set()
    for answer in (await client.post(PATH, json=chat()), await client.get("/nope"), await client.get("/livez")):
        ids.add(answer.headers["x-request-id"])
        assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
        assert answer.headers["openai-version"] == "2020-10-01"
        assert answer.headers["openai-processing-ms"].isdecimal()
    assert len(ids) == 3
    assert (await client.get("/v1/models")).headers["openai-organization"] == "acme"


def routes() -> list[APIRoute]:
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


async def test_every_route_declares_who_may_call_it() -> None:
    """AU-01: no route but the public ones is without a scope, and those of /admin want the admin key."""
    assert len(routes()) > 40
    for route in routes():
        scopes = {
            dependency.call.scope
            for dependency in route.dependant.dependencies
            if isinstance(dependency.call, Requires)
        }
        assert scopes or route.path in PUBLIC, route.path
        if route.path.startswith(("/admin", "/metrics")):
            assert scopes & {"admin", "admin:keys"}, route.path


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer",
        "Bearer wrong",
        "Bearer chorus_live_a_b_1",
        "Basic eDp5",
        "Bearer a b",
        "c",
        "Bearer " + "x" * 5000,
    ],
)
async def test_nothing_without_a_key(server: Live, authorization: str | None) -> None:
    """AU-01: without a good key every path, known or not, in every spelling and method, is 401; only the health checks
    answer."""
    client = await server.stack.enter_async_context(httpx.AsyncClient(base_url=server.url, verify=False))
    headers = {} if authorization is None else {"authorization": authorization}
    paths = {re.sub(r"{[^}]*}", "x", route.path) for route in routes()} - PUBLIC
    paths |= {
        "/docs",
        "/openapi.json",
        "/redoc",
        "/nope",
        "//v1/models",
        "/v1/models/",
        "/V1/Models",
        "/livez/",
        "/",
        "/health/x",
    }

    for path in sorted(paths):
        assert (await client.head(path, headers=headers)).status_code == 401
        for method in ("GET", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            assert error_of(answer)["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in PUBLIC:
        assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        (PATH, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages[0].content[0].text"),
        (PATH, {"messages": [{"role": "user", "content": "x"}], "metadata": {"Team": 5}}, "metadata.Team"),
        ("/v1/responses", {"input": "x", "conversation": {"id": "c", "x": 1}}, "conversation.x"),
    ],
)  # fmt: skip
async def test_paths_are_those_of_the_request(server: Live, path: str, body: dict[str, Any], param: str) -> None:
    """T1: `param` is the path in what the client sent, without the names of our own classes."""
    client = await server.http(await server.key("acme"))
    answer = await client.post(path, json={"model": "tiny"} | body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_keys_of_two_classes(server: Live) -> None:
    """AU-02: a tenant's key is 403 on every admin route, the admin's on inference; the document needs any key."""
    tenant, admin = await server.http(await server.key("acme")), await server.http()

    for path in ("/admin/v1/tenants", "/metrics", "/admin/v1/usage"):
        assert (await tenant.get(path)).status_code == 403
        assert (await admin.get(path)).status_code == 200
    for path in ("/v1/models", "/v1/models/tiny"):
        answer = await admin.get(path)
        assert answer.status_code == 403
        assert error_of(answer)["code"] == "insufficient_permissions"
    assert (await tenant.get("/openapi.json")).status_code == 200
    assert (await tenant.get("/version")).json()["version"]
    writer = await server.http(await server.key("acme", "adapters:write"))
    assert (await writer.post(PATH, json=chat())).status_code == 403


async def test_two_authorizations_are_none(server: Live) -> None:
    """AU-01: two Authorization headers are refused rather than one of them chosen; a foreign organisation or project
    is, too."""
    key = await server.key("acme")
    client = await server.http(key)

    two = await client.get("/v1/models", headers=[("authorization", f"Bearer {key}"), ("authorization", "Bearer x")])
    assert two.status_code == 401
    for what in ("organization", "project"):
        foreign = await client.get("/v1/models", headers={f"openai-{what}": "bolt"})
        assert (foreign.status_code, error_of(foreign)["code"]) == (401, f"mismatched_{what}")
        assert (await client.get("/v1/models", headers={f"openai-{what}": "acme"})).status_code == 200


async def test_errors_under_load_leave_nothing(server: Live) -> None:
    """HT-02, QB-02: fifty refused and fifty good calls at once, some of which the engine refuses or breaks off: nothing
    is held afterwards, and fifty places of fifty are free."""
    script = Script(fail_after=1).install(server)
    client = await server.http(await server.key("crowd"))
    await (await server.http()).patch("/admin/v1/tenants/crowd", json={"limits": {"concurrency": 50}})

    bad = [client.post(PATH, content=raw) for raw in (list(BROKEN.values()) * 3)[:50]]
    good = [client.post(PATH, json=chat(stream=i % 2 == 0)) for i in range(25)]
    assert [answer.status_code for answer in await asyncio.gather(*bad, *good)] == [400] * 50 + [200] * 25
    script.error = Broken("engine_error", "died")
    broken = await asyncio.gather(*(client.post(PATH, json=chat(stream=i % 2 == 0)) for i in range(20)))
    assert [answer.status_code for answer in broken] == [200, 500] * 10
    script.fail_after, script.error = None, Refused("queue_full", "full", 1.0)
    refused = await asyncio.gather(*(client.post(PATH, json=chat(stream=i % 2 == 0)) for i in range(20)))
    assert {answer.status_code for answer in refused} == {503}

    script.error = None
    assert await server.num_leases("crowd") == 0
    answers = await asyncio.gather(*(client.post(PATH, json=chat()) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}


def many(what: str) -> bytes:
    """Bodies of about 7 MB that are a lot of work for whoever builds objects before looking."""
    bodies = {
        "messages": chat()["messages"] * 200_000,
        "parts": [{"role": "user", "content": [{"type": "zzz"}] * 500_000}],
        "wrong": [1] * 3_000_000,
    }
    prompts = {
        "strings": ["a"] * 1_500_000,
        "ids": [1] * 3_000_000,
        "lists": [[1]] * 1_500_000,
        "mixed": [*[1] * 3_000_000, "x"],
    }
    body = {"messages": bodies[what]} if what in bodies else {"prompt": prompts[what]}
    return json.dumps({"model": "tiny", **body}, separators=(",", ":")).encode()


@pytest.mark.parametrize("what", ["messages", "parts", "wrong", "strings", "ids", "lists", "mixed"])
async def test_much_of_nothing(server: Live, what: str) -> None:
    """HT-04: millions of messages, prompts or wrong entries are refused quickly: no other call waits long for it, and
    the error is small."""
    client = await server.http(await server.key("acme"))
    raw = many(what)
    path = PATH if what in ("messages", "parts", "wrong") else "/v1/completions"
    longest = 0.0

    task = asyncio.create_task(client.post(path, content=raw, headers={"content-type": "application/json"}))
    while not task.done():
        started = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - started)

    answer = await task
    assert answer.status_code in (400, 413), answer.text
    error_of(answer)
    assert longest < 1.0, "the event loop stood still"


async def test_the_log_quotes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that nobody expected is logged with its kind, its place and its cause, but without messages: they may
    hold what somebody said."""

    def fail() -> None:
        try:
            raise KeyError("a secret prompt")
        except KeyError as error:
            raise RuntimeError("with a secret prompt") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    answer = to_api_error(caught.value)

    assert (answer.status, answer.code) == (500, None)
    assert "RuntimeError" in caplog.text
    assert "KeyError" in caplog.text
    assert "test_errors.py" in caplog.text
    assert "secret" not in caplog.text + answer.message
