"""Streams and disconnects, pure ASGI: EventStream sends frames as text/event-stream; unless_gone() waits for a plain
answer. In both, a client that leaves cancels the work at once. Knows no request and no model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError, to_api_error, unavailable

KEEP_ALIVE_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
Answered = TypeVar("Answered")
GONE = "chorus.gone"
"""Where our server's ASGI scope carries a future that is done when the client has closed the connection. (A server may
send `http.disconnect` also when it stops itself.)"""


def frame(data: bytes) -> bytes:
    """One event. Never `event:` or `id:` on OpenAI's chat streams, always closed by an empty line."""
    return b"data: " + data + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """A fault in mid-stream: the status is out, so the body tells it; no [DONE] follows."""
    return frame(error.body())


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Answered]) -> Answered:
    """The result of `work`, which is cancelled when the client leaves; then raises ClientDisconnect."""
    task = asyncio.current_task()
    assert task is not None
    watch: asyncio.Future[None] = request.scope.get(GONE) or asyncio.ensure_future(gone(request.receive))
    is_gone = False

    def leave(_: object) -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watch.remove_done_callback(leave)
        if watch is not request.scope.get(GONE):
            watch.cancel()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs, and waits until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends `frames` as they come, comment lines while none does, and calls `close` once, however it ends: all sent,
    a fault (`on_error` → its last frame), the client gone, or the server stopping."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[ApiError], bytes] = error_frame,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **(headers or {}),
            }
        )
        self._frames = frames
        self._close = close
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch: asyncio.Future[None] = scope.get(GONE) or asyncio.ensure_future(gone(receive))
        try:
            await self._keep_alive(pump, watch, send)
        except asyncio.CancelledError:  # not the client: the server stops, and its grace is over
            await _end(pump)
            with contextlib.suppress(Exception):
                await self._last(send, self._on_error(unavailable("The server is shutting down.")))
            raise
        finally:
            await (_end(pump) if watch is scope.get(GONE) else _end(pump, watch))
            await self._close()

    async def _keep_alive(self, pump: asyncio.Future[None], watch: asyncio.Future[None], send: Send) -> None:
        """Until one of the two ends; `pump` sends while we watch, so pings go out only between its frames."""
        loop = asyncio.get_running_loop()
        while not (pump.done() or watch.done()):
            idle_s = loop.time() - self._sent_at if self._sent_at else 0.0
            await asyncio.wait(
                {pump, watch}, timeout=max(0.001, self._keep_alive_s - idle_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not pump.done() and self._sent_at and loop.time() - self._sent_at >= self._keep_alive_s:
                await self._send(send, PING)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, b"")
        try:
            async for data in self._frames:
                await self._send(send, data)
            last = b""
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it
            last = self._on_error(to_api_error(error))
        await self._last(send, last)

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        message: Message = {"type": "http.response.body", "body": data, "more_body": True}
        await send(message)

    async def _last(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": False})
