"""What nobody should send: refused early, quickly and in OpenAI's shape, whatever layer refuses it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from gateway import bodies, http_guard
from tests.gateway.live import Live
from tests.gateway.scripted import chat, error_of

PATH = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def raw(server: Live, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, dict[str, Any]]:
    """Sends the pieces on one connection and reads until it is closed. → status, error."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reading = asyncio.create_task(reader.read())
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    answer = await asyncio.wait_for(reading, 20)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert re.search(rb"\r\nx-request-id: req_[0-9a-f]{32}(\r\n|$)", head)
    assert len(body) < 10_000
    return int(head[9:12]), json.loads(body)["error"]


def head(key: str, *more: str) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "host: x", f"authorization: Bearer {key}", "connection: close", *more, "", ""]
    return "\r\n".join(lines).encode()


async def test_a_large_body_is_refused_from_its_length(server: Live) -> None:
    """HT-04, T3: 413 before a byte of the body was sent; and the answer reaches a client that sends all of it first."""
    key = await server.key("acme")

    status, error = await raw(server, head(key, "content-length: 25000000") + b"x", b"x" * 24_999_999)

    assert (status, error["code"]) == (413, "request_too_large")
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(key, "content-length: 25000000"))
    line = await asyncio.wait_for(reader.readline(), 1)  # it does not wait for the body
    assert line.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_large_body_without_length_is_refused_while_it_comes(server: Live) -> None:
    """HT-04: a chunked body is 413 as soon as it is larger than anything that the model can read, and 1 MiB."""
    part = b"10000\r\n" + b"x" * 65536 + b"\r\n"

    status, error = await raw(server, head(await server.key("acme"), "transfer-encoding: chunked"), *[part] * 100)

    assert (status, error["code"]) == (413, "request_too_large")


async def test_what_the_model_can_read_is_not_too_large(server: Live) -> None:
    """A prompt that fits is read, though every character of it is escaped: the limit is no smaller than that."""
    client = await server.http(await server.key("acme"))
    text = "é" * 200

    answer = await client.post(PATH, content=json.dumps(chat(text, max_tokens=1)).encode())

    assert answer.status_code == 200, answer.text
    long = await client.post(PATH, json=chat("word " * 200_000))  # a megabyte: read, and told what is wrong with it
    assert error_of(long)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (json.dumps(chat(stop_token_ids=[1] * 150_000)), "stop_token_ids"),
        (json.dumps(chat(logit_bias={str(i): 1 for i in range(3000)})), "logit_bias"),
        (json.dumps({"model": "tiny", "prompt": [1] * 150_000}), "prompt"),
        ('{"model":"tiny","prompt":[' + "1," * 300_000 + "1]}", None),
        (json.dumps(chat(metadata={str(i): "x" for i in range(50_000)})), None),
    ],
    ids=["stop ids", "biases", "prompt", "values", "pairs"],
)
async def test_endless_lists_are_not_looked_at(server: Live, body: str, param: str | None) -> None:
    """HT-04: lists that no model could read and objects that nobody would write are 400 before they are validated, and
    nobody waits for it."""
    client = await server.http(await server.key("acme"))

    answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


async def test_slow_headers(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """HT-10: who opens a connection and does not send a whole head in time is answered 408 and cut off."""
    monkeypatch.setattr(http_guard, "HEAD_S", 0.2)

    assert (await raw(server))[0] == 408
    status, error = await raw(server, b"GET /livez HTTP/1.1\r\n", *[b"a: b\r\n"] * 5, pause_s=0.1)

    assert (status, error["code"]) == (408, "timeout")


async def test_slow_bodies(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that does not arrive in time is 408."""
    monkeypatch.setattr(bodies, "BODY_S", 0.2)

    status, error = await raw(server, head(await server.key("acme"), "content-length: 100"), b'{"model"')

    assert (status, error["code"]) == (408, "timeout")


async def test_large_heads(server: Live) -> None:
    """HT-06: a megabyte of headers, or of URL, is 431; ordinary large ones pass."""
    client = await server.http(await server.key("acme"))

    for first in (b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10**6, b"GET /" + b"y" * 10**6 + b" HTTP/1.1"):
        status, error = await raw(server, first + b"\r\n\r\n")
        assert (status, error["code"]) == (431, "header_fields_too_large")
    assert (await client.get("/livez", headers={"x-client-request-id": "z" * 20_000})).status_code == 200


@pytest.mark.parametrize(
    "noise",
    [
        bytes.fromhex("16030100c5010000c10303"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\1\2" * 100,
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: a\nb\0c\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\n b\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "noise", "newline in an id", "folded id"],
)
async def test_what_is_no_http(server: Live, noise: bytes) -> None:
    """HT-06, HT-10, T3: port scanners, and headers that would smuggle in others, get the error object too, and the
    worker goes on."""
    status, error = await raw(server, noise)

    assert status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (await (await server.http()).get("/livez")).status_code == 200
