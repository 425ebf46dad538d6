"""Context: the outermost ASGI layer: request id, OpenAI's headers, request metrics, and the answer to every fault that
no route caught. Knows no route."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import CALLER
from gateway.bodies import IGNORED
from gateway.errors import to_api_error
from gateway.state import State
from tenants.keys import Principal

log = logging.getLogger("chorus.gateway")
REQUEST_ID = "chorus.request_id"
OPENAI_VERSION = "2020-10-01"
MAX_IGNORED = 1000
CLIENT_ID = re.compile(r"[\x21-\x7e]{1,512}")


class Context:
    """Ids are ours: what a client sends as its own is only logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = scope[REQUEST_ID] = f"req_{secrets.token_hex(16)}"
        started = time.monotonic()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(MutableHeaders(scope=message), scope, started)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            answer = to_api_error(error)
            if status:
                log.error("%s broke off after its answer had begun: %s", request_id, type(error).__name__)
                raise
            await answer.response()(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            status = status or 499
            raise
        finally:
            _record(scope, status, time.monotonic() - started)


def _add_headers(headers: MutableHeaders, scope: Scope, started: float) -> None:
    headers["x-request-id"] = scope[REQUEST_ID]
    headers["openai-version"] = OPENAI_VERSION
    headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))
    ignored = scope.get(IGNORED)
    if ignored:
        headers["x-chorus-ignored"] = quote(", ".join(ignored)[:MAX_IGNORED], safe="[]., ")
    caller = scope.get(CALLER)
    if isinstance(caller, Principal):
        headers["openai-organization"] = quote(caller.tenant_id)


def _record(scope: Scope, status: int, seconds: float) -> None:
    state: State | None = scope.get("state", {}).get("chorus")
    route = getattr(scope.get("route"), "path", "other")
    if state is not None:
        state.metrics.add("chorus_requests", route, str(status))
        state.metrics.observe("chorus_request_seconds", route, seconds=seconds)
    client_id = next((value for name, value in scope["headers"] if name == b"x-client-request-id"), b"")
    client = client_id.decode("latin-1")
    log.debug(
        "%s %s %s %d %.3fs%s", scope[REQUEST_ID], scope["method"], route, status, seconds,
        f" client={client}" if CLIENT_ID.fullmatch(client) else "",
    )  # fmt: skip
