"""Request bodies, strictly, before any route sees them: a size limit while reading, then one JSON value in UTF-8, no
NaN, lone surrogates or repeated keys. Multipart uploads pass: their route reads and bounds them itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.protocol import Refused
from gateway.auth import CALLER
from gateway.errors import ApiError, bad_request, json_path, to_api_error, too_large
from gateway.items import UNKNOWN, ItemError

if TYPE_CHECKING:
    from gateway.state import State

Body = TypeVar("Body", bound=BaseModel)
PARSED = "chorus.json"
"""Where the ASGI scope carries the parsed body."""
WHOLE = "chorus.whole"
"""Where our server's ASGI scope says that all of the body has come."""
ESCAPED = 6
"""Characters of JSON for one byte of text, at most: \\u0001."""
BODY_S = 60.0
PARSE_SPEED = 32
"""So much faster is reading JSON than making tokens of a text: what is large goes to the same few threads."""
LENIENT = "chorus.lenient"
"""Whether what nobody knows is left out; where the scope does not say, the caller's tenant decides."""
IGNORED = "chorus.ignored"
"""Where the ASGI scope carries the paths of fields that were left out."""
MIN_BRACKETS = 20_000
MIN_COMMAS = 200_000
PER_TOKEN = 8
MAX_LIST, MAX_PAIRS = 100_000, 2000
"""Entries of any list (or as many as the model can read), and of any object, in a field of a body."""
MAX_FORGOTTEN, FORGET_S = 64 << 20, 5.0
"""Bytes and time of a refused body that are still read."""


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
            raw = await _read_in_time(request, _limit(state))
            check_amount(raw, state.inference.models.max_model_len)
            encoder = state.inference.encoder
            scope[PARSED] = await encoder.offload(len(raw) // PARSE_SPEED, lambda: parse(raw)) if raw else None
            check_sizes(scope[PARSED], state.inference.models.max_model_len)
        except (ApiError, Refused) as error:
            answer = to_api_error(error)
            if answer.status == 413:
                return await _refuse(answer, receive, send)
            return await answer.response()(scope, receive, send)
        except ClientDisconnect:
            return None
        await self._app(scope, _replay(raw, receive), send)


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    """The answer is out at once; what the client still sends is read and forgotten, within bounds, because a connection
    that is closed before would be reset, and the answer lost with it."""
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    num_left = MAX_FORGOTTEN
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORGET_S):
            while num_left > 0:
                message = await receive()
                num_left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _limit(state: State) -> int:
    """No body is larger than a prompt that the model can read, every byte of it escaped, and a mebibyte beside it."""
    inference = state.inference
    longest = ESCAPED * inference.models.max_model_len * inference.tokenizer.longest_token_bytes
    return min(state.settings.max_body, longest + (1 << 20))


async def _read_in_time(request: Request, limit: int) -> bytes:
    if WHOLE in request.scope:
        return await read_body(request, limit)
    try:
        async with asyncio.timeout(BODY_S):
            return await read_body(request, limit)
    except TimeoutError:
        raise ApiError(408, "The request body did not arrive in time.", code="timeout") from None


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
    parts, size, has_more = [], 0, True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
        has_more = message.get("more_body", False)
    return b"".join(parts)


def check_amount(raw: bytes, max_model_len: int) -> None:
    """More messages than the model can read tokens, and more brackets than it could read as text, are refused before
    objects are made of them. (Inside a string the quotes of "role" would be escaped.)"""
    if raw.count(b"[") + raw.count(b"{") > max(MIN_BRACKETS, PER_TOKEN * max_model_len):
        raise bad_request("The request body holds too many lists and objects.")
    if raw.count(b'":') > max(MIN_BRACKETS, PER_TOKEN * max_model_len):
        raise bad_request("The request body holds too many fields.")
    if raw.count(b",") > max(MIN_COMMAS, PER_TOKEN * max_model_len):
        raise bad_request("The request body holds too many values.")
    count = raw.count(b'"role"')
    if count > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens; {count} messages can't fit.", "messages",
            "context_length_exceeded",
        )  # fmt: skip


def check_sizes(value: Any, max_model_len: int) -> None:
    """No field has a list that no model could read, nor an object that nobody would write: pydantic would look at every
    entry of it. Raises ApiError 400."""
    for name, field in value.items() if isinstance(value, dict) else ():
        limit = max(MAX_LIST, max_model_len) if isinstance(field, list) else MAX_PAIRS
        if isinstance(field, list | dict) and len(field) > limit:
            raise bad_request(f"Invalid value for '{name[:64]}': at most {limit} entries.", name[:64])


_NAMES = re.compile(rb'"[ \t\r\n]*:')
"""What follows every name of an object; inside of strings it is rare."""


def _num_names(value: Any) -> int:
    """In all objects together. As many as end in the text: then none was there twice."""
    count, todo = 0, [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            count += len(part)
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    return count


class _Repeated(ValueError):
    pass


def parse(raw: bytes) -> Any:
    """Raises ApiError 400."""
    try:
        value = orjson.loads(raw)
        if len(_NAMES.findall(raw)) != _num_names(value):
            json.loads(raw, object_pairs_hook=_unrepeated)
    except _Repeated as error:
        raise bad_request(f"The JSON object has the key {str(error)[:100]!r} twice.", code=None) from error
    except ValueError as error:
        raise _not_json(raw) from error
    except RecursionError as error:
        raise bad_request("We could not parse the body: it is nested too deeply.", code=None) from error
    return value


def _not_json(raw: bytes) -> ApiError:
    """Python's reader takes numbers that JSON has not: NaN, infinities, 1e999. Their field is named."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(raw)
        for name, field in value.items() if isinstance(value, dict) else ():
            if _has_no_number(field):
                return bad_request(f"Invalid value for '{name[:64]}': numbers must be finite.", name[:64])
    return bad_request("We could not parse the body of your request: it is not valid JSON.", code=None)


def _has_no_number(value: Any) -> bool:
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, float) and not math.isfinite(part):
            return True
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False


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
    ignored = ignored_of(request)
    return kind.model_validate(value) if ignored is None else _known(value, kind, ignored)


def ignored_of(request: Request) -> list[str] | None:
    """For tenants that want so: where the path of what nobody knows is noted instead of being refused; the answer's
    x-chorus-ignored tells it. None for the others."""
    is_lenient = request.scope.get(LENIENT, getattr(request.scope.get(CALLER), "ignores_unknown", False))
    found: list[str] | None = request.scope.setdefault(IGNORED, []) if is_lenient else None
    return found


def _known(value: Any, kind: type[Body], ignored: list[str]) -> Body:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        unknown = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
        if not unknown:
            raise
    for location in unknown:
        _remove(value, location)
    ignored += [json_path(location) or "?" for location in unknown]
    return kind.model_validate(value)


def has_unknown(error: ValidationError | ItemError) -> bool:
    """Is there a field that nobody knows among what is wrong?"""
    if isinstance(error, ItemError):
        return error.code == UNKNOWN
    return any(detail["type"] == "extra_forbidden" for detail in error.errors())


def _remove(value: Any, location: tuple[int | str, ...]) -> None:
    """Names of union members in `location` are not in the value: they are passed over."""
    for part in location[:-1]:
        if isinstance(part, int) if isinstance(value, list) else isinstance(value, dict) and part in value:
            value = cast("Any", value)[part]
    if isinstance(value, dict):
        value.pop(location[-1], None)
