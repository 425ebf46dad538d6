"""EventStream by itself: its frames, its end by the server's own stop, its one close."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from gateway.sse import GONE, EventStream, frame, unless_gone

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Connection:
    """What a server gives to an application; `leave` is the client's going."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self.num_closed = 0

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def close(self) -> None:
        self.num_closed += 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def endless() -> AsyncIterator[bytes]:
    yield frame(b"1")
    await asyncio.Event().wait()


async def test_the_servers_own_stop_is_told() -> None:
    """T50: when the server's grace is over, the stream ends with an error event, not as if it were complete."""
    connection = Connection()
    stream = EventStream(endless(), close=connection.close)
    task = asyncio.create_task(stream(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.02)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    error = json.loads(connection.body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert b"[DONE]" not in connection.body
    assert connection.sent[-1]["more_body"] is False
    assert connection.num_closed == 1


async def test_the_servers_own_stop_is_no_client_that_leaves() -> None:
    """T50: a server that says `http.disconnect` when it begins to stop ends no stream: what our server knows of the
    connection itself counts, and the stream goes on to its end within the grace."""
    connection = Connection()
    may_end, gone = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def frames() -> AsyncIterator[bytes]:
        yield frame(b"1")
        await may_end.wait()
        yield frame(b"2")

    stream = EventStream(frames(), close=connection.close)
    task = asyncio.create_task(stream({**SCOPE, GONE: gone}, connection.receive, connection.send))
    await asyncio.sleep(0.02)
    connection.leave.set()
    await asyncio.sleep(0.02)
    may_end.set()
    await task

    assert connection.body == frame(b"1") + frame(b"2")
    assert connection.num_closed == 1
    assert not gone.done()


async def test_our_own_sign_of_a_client_that_left() -> None:
    """T49, T50: the connection's end, as our server knows it, ends the stream."""
    connection = Connection()
    gone = asyncio.get_running_loop().create_future()
    stream = EventStream(endless(), close=connection.close)
    task = asyncio.create_task(stream({**SCOPE, GONE: gone}, connection.receive, connection.send))
    await asyncio.sleep(0.02)

    gone.set_result(None)
    await asyncio.wait_for(task, 5)

    assert connection.num_closed == 1


async def test_a_client_that_left_is_sent_nothing() -> None:
    """T49: after the client has gone nothing is sent, and the stream is closed once."""
    connection = Connection()
    stream = EventStream(endless(), close=connection.close)
    task = asyncio.create_task(stream(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.02)
    num_sent = len(connection.sent)

    connection.leave.set()
    await task

    assert len(connection.sent) == num_sent
    assert connection.num_closed == 1


async def test_gone_before_the_first_byte() -> None:
    """T49: a client that left before the response began is closed for, too, though no frame was ever asked for."""
    connection = Connection()
    connection.leave.set()

    await EventStream(endless(), close=connection.close)(SCOPE, connection.receive, connection.send)

    assert connection.num_closed == 1


async def test_a_sending_that_fails() -> None:
    """A socket that breaks while we send ends the stream and closes it."""
    connection = Connection()

    async def broken(_: Any) -> None:
        raise OSError("connection lost")

    await EventStream(endless(), close=connection.close)(SCOPE, connection.receive, broken)

    assert connection.num_closed == 1


async def test_work_for_a_client_that_leaves() -> None:
    """KV-01: the work for a plain answer is cancelled, and has cleaned up, before the caller goes on."""
    connection = Connection()
    cleaned = []

    async def work() -> int:
        try:
            await asyncio.Event().wait()
            return 1
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    task = asyncio.create_task(unless_gone(Request(SCOPE, connection.receive), work()))
    await asyncio.sleep(0.02)
    connection.leave.set()

    with pytest.raises(ClientDisconnect):
        await task
    assert cleaned == [True]


async def test_work_that_is_done() -> None:
    """Its result or its error is the caller's."""

    async def fails() -> int:
        raise KeyError("x")

    async def works() -> int:
        return 7

    assert await unless_gone(Request(SCOPE, Connection().receive), works()) == 7
    with pytest.raises(KeyError):
        await unless_gone(Request(SCOPE, Connection().receive), fails())
