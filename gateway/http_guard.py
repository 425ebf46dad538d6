"""GuardedProtocol: uvicorn's HTTP/1.1, with a bound on the size of a request's head and on the time that it may take,
and OpenAI's error shape where no application is reached yet. Knows no route."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.bodies import WHOLE
from gateway.context import request_id
from gateway.cork import Corked
from gateway.sse import GONE

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 15.0
"""From the connection, or from a request's first byte, to the end of its headers."""
LINGER_S = 1.0
"""So long what still comes is read and forgotten: closing at once would reset the connection, and lose the answer."""
_HEAD = (
    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n"
    b"connection: close\r\n\r\n"
)
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """One connection. What it refuses ends the connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_head = False
        self._is_refused = False
        self._gone: asyncio.Future[None] = self.loop.create_future()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_head and self._timer is None and not self._is_refused:
            self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport, self.loop))  # type: ignore[arg-type]
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._is_head = True
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[GONE] = self._gone

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("too large")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("too large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        cast("dict[str, Any]", self.scope)[WHOLE] = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to whatever its parser does not accept, which is also what _count() raises."""
        self._stop_timer()
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.", "header_fields_too_large")
        else:
            self._refuse(400, "This is not an HTTP/1.1 request.", None)

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(408, "The request's headers did not arrive in time.", "timeout")

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": error})
        self._is_refused = True
        self.transport.write(_HEAD % (status, _REASONS[status], len(body), request_id().encode()) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
