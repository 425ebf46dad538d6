"""Context: the outermost ASGI layer: request id, OpenAI's headers, request metrics, and the answer to every fault that
no route caught. Knows no route."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import CALLER
from gateway.bodies import IGNORED
from gateway.errors import to_api_error, traced
from gateway.state import State
from tenants.keys import Principal

log = logging.getLogger("chorus.gateway")
REQUEST_ID = "chorus.request_id"
OPENAI_VERSION = b"2020-10-01"
MAX_IGNORED = 1000
CLIENT_ID = re.compile(r"[\x21-\x7e]{1,512}")


def request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


class BrokenOff(Exception):
    """An answer that had begun could not be ended."""


class Context:
    """Ids are ours: what a client sends as its own is only logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        id_ = scope[REQUEST_ID] = request_id()
        started = time.monotonic()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_headers(scope, started)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 - logged, without what it may quote
            answer = to_api_error(error)
            if status:
                log.error("%s broke off after its answer had begun: %s", id_, traced(error))
                raise BrokenOff from None  # the server closes the connection, and logs what it gets
            await answer.response()(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            status = status or 499
            raise
        finally:
            _record(scope, status, time.monotonic() - started)


def _headers(scope: Scope, started: float) -> list[tuple[bytes, bytes]]:
    """Those of every answer."""
    milliseconds = round((time.monotonic() - started) * 1000)
    headers = [
        (b"x-request-id", scope[REQUEST_ID].encode()), (b"openai-version", OPENAI_VERSION),
        (b"openai-processing-ms", b"%d" % milliseconds),
    ]  # fmt: skip
    ignored = scope.get(IGNORED)
    if ignored:
        paths = ", ".join(sorted(set(ignored)))[:MAX_IGNORED]
        headers.append((b"x-chorus-ignored", quote(paths, safe="[]., ").encode()))
    caller = scope.get(CALLER)
    if isinstance(caller, Principal):
        headers.append((b"openai-organization", caller.tenant_id.encode()))
    return headers


def _record(scope: Scope, status: int, seconds: float) -> None:
    state: State | None = scope.get("state", {}).get("chorus")
    route = getattr(scope.get("route"), "path", "other")
    if state is not None:
        state.metrics.add("chorus_requests", route, str(status))
        state.metrics.observe("chorus_request_seconds", route, seconds=seconds)
    if not log.isEnabledFor(logging.DEBUG):
        return
    client_id = next((value for name, value in scope["headers"] if name == b"x-client-request-id"), b"")
    client = client_id.decode("latin-1")
    log.debug(
        "%s %s %s %d %.3fs%s", scope[REQUEST_ID], scope["method"], route, status, seconds,
        f" client={client}" if CLIENT_ID.fullmatch(client) else "",
    )  # fmt: skip
