"""Request bodies, strictly, before any route sees them: a size limit while reading, then one JSON value in UTF-8, no
NaN, lone surrogates or repeated keys. Multipart uploads pass: their route reads and bounds them itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, bad_request, too_large

if TYPE_CHECKING:
    from gateway.state import State

Body = TypeVar("Body", bound=BaseModel)
PARSED = "chorus.json"
"""Where the ASGI scope carries the parsed body."""
MIN_BRACKETS = 20_000
BRACKETS_PER_TOKEN = 8


class StrictBodies:
    """ASGI: reads the body, answers 413 or 400, or hands body and parsed value on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or _is_multipart(request):
            return await self._app(scope, receive, send)
        state: State = scope["state"]["chorus"]
        try:
            raw = await read_body(request, state.settings.max_body)
            check_amount(raw, state.inference.models.max_model_len)
            scope[PARSED] = parse(raw) if raw else None
        except ApiError as error:
            return await error.response()(scope, receive, send)
        except ClientDisconnect:
            return None
        await self._app(scope, _replay(raw, receive), send)


def _is_multipart(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/")


def _replay(raw: bytes, receive: Receive) -> Receive:
    """The body once more, for routes that read it; then whatever comes, such as the disconnect."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError 413 from Content-Length, or as soon as more than `limit` bytes have come."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    return b"".join(parts)


def check_amount(raw: bytes, max_model_len: int) -> None:
    """More messages than the model can read tokens, and more brackets than it could read as text, are refused before
    objects are made of them. (Inside a string the quotes of "role" would be escaped.)"""
    if raw.count(b"[") + raw.count(b"{") > max(MIN_BRACKETS, BRACKETS_PER_TOKEN * max_model_len):
        raise bad_request("The request body holds too many lists and objects.")
    count = raw.count(b'"role"')
    if count > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens; {count} messages can't fit.", "messages",
            "context_length_exceeded",
        )  # fmt: skip


class _Repeated(ValueError):
    pass


def parse(raw: bytes) -> Any:
    """Raises ApiError 400."""
    try:
        value = orjson.loads(raw)
        json.loads(raw, object_pairs_hook=_unrepeated)
    except _Repeated as error:
        raise bad_request(f"The JSON object has the key {str(error)[:100]!r} twice.", code=None) from error
    except ValueError as error:
        raise bad_request("We could not parse the body of your request: it is not valid JSON.", code=None) from error
    except RecursionError as error:
        raise bad_request("We could not parse the body: it is nested too deeply.", code=None) from error
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return found


def body_as(request: Request, kind: type[Body]) -> Body:
    """The parsed body as `kind`. Raises ApiError, or pydantic's ValidationError."""
    value = request.scope.get(PARSED)
    if value is None:
        raise bad_request("The request body is empty; it must be a JSON object.", code=None)
    return kind.model_validate(value)
