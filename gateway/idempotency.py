"""Idempotency-Key on POSTs: a request that is sent again with the same key is not done again but gets the first answer.

By caller, path and key; another body, or one whose first request still runs, is 409. Streams are given again whole or
not at all. Faults of ours, limits, and answers whose client left are not kept: they may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import CALLER, METERED, AdminPrincipal, renewal
from gateway.bodies import PARSED
from gateway.errors import ApiError, bad_request, to_api_error
from gateway.fingerprints import MultipartFingerprint, of_json
from gateway.replays import LEASE_S, Claim, Found, Kept
from gateway.sse import DONE
from gateway.upload import check_length, in_time
from tenants.db import StateUnavailable
from tenants.periodic import Periodic

if TYPE_CHECKING:
    from gateway.state import State

log = logging.getLogger("chorus.gateway")
HEADER = "idempotency-key"
RAW = HEADER.encode()
MAX_KEY = 255
MAX_KEPT = 1 << 20
"""Bytes of an answer; a longer one is given once."""
REPLAYED = "idempotency-replayed"
KEPT_HEADERS = ("content-type", "x-adapter-version", "cache-control", "x-accel-buffering", "x-should-retry")
AGAIN = frozenset({401, 403, 408, 429, 499})
"""Statuses that may be others the next time."""
ENDS = (b"event: response.completed\n", b"event: response.incomplete\n")


class Idempotent:
    """ASGI: passes on what is no POST with the header; else runs it once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _given(scope)
        if given is None:
            return await self._app(scope, receive, send)
        state: State = scope["state"]["chorus"]
        request = Request(scope, receive)
        try:
            claim, body = _claim(state, request, given), _Body(state, request)
            found = await state.replays.claim(claim, body.fingerprint)
            answer = None if found is None else await _replay(state, request, body, found)
        except Exception as error:  # noqa: BLE001 - answered as those of all routes are
            answer = to_api_error(error).response()
        if answer is None:
            await _Run(state, claim, body).run(self._app, scope, send)
        else:
            await answer(scope, receive, send)


def _given(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST" or CALLER not in scope:
        return None
    found = next((value for name, value in scope["headers"] if name == RAW), None)
    return None if found is None else found.decode("latin-1")


def _claim(state: State, request: Request, given: str) -> Claim:
    if not 0 < len(given) <= MAX_KEY:
        raise bad_request(f"Idempotency-Key has 1 to {MAX_KEY} characters.", HEADER)
    caller, path = request.scope[CALLER], request.scope["path"]
    if isinstance(caller, AdminPrincipal):
        return Claim(state.replays.record("", caller.administrator.key_id, path, given), b"")
    record = state.replays.record(caller.tenant_id, caller.key_id, path, given)
    ttl_s = state.conversations.ttl_s(caller.retention_s)
    return Claim(record, b"", caller.tenant_id, ttl_s, caller.epoch)


class _Body:
    """The request's body, known (JSON) or passing by (uploads), and its fingerprint as far as it is known."""

    def __init__(self, state: State, request: Request) -> None:
        scope = request.scope
        self._state = state
        self._request = request
        self._json: str | None = None
        self._upload: MultipartFingerprint | None = None
        if PARSED in scope:
            self._json = state.replays.keyed(of_json(scope["query_string"], scope[PARSED]))
        else:
            self._upload = MultipartFingerprint(scope["query_string"], request.headers.get("content-type", ""))

    @property
    def fingerprint(self) -> str | None:
        if self._upload is None:
            return self._json
        return None if self._upload.value is None else self._state.replays.keyed(self._upload.value)

    async def receive(self) -> Message:
        message = await self._request.receive()
        if self._upload is not None and message["type"] == "http.request":
            self._upload.feed(message.get("body", b""))
        return message

    async def read(self) -> str | None:
        """The fingerprint of all of it; nothing of an upload is kept. Raises UploadError."""
        if self._upload is not None:
            settings = self._state.settings
            check_length(self._request.headers, settings.max_upload)
            async for data in in_time(self._request.stream(), settings.request_timeout_s):
                self._upload.feed(data)
        return self.fingerprint


class _Run:
    """A request that is done for the first time; its answer is noted on its way out."""

    def __init__(self, state: State, claim: Claim, body: _Body) -> None:
        self._state = state
        self._claim = claim
        self._body = body
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._keeps_text = claim.ttl_s > 0
        self._has_ended = False

    async def run(self, app: ASGIApp, scope: Scope, send: Send) -> None:
        async def note(message: Message) -> None:
            self._note(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._end()  # before the client can know, and ask again
            await send(message)

        async with Periodic(self._renew, LEASE_S / 3):
            try:
                await app(scope, self._body.receive, note)
            except Exception as error:
                if self._status:
                    raise
                await to_api_error(error).response()(scope, self._body.receive, note)
            finally:
                if not self._has_ended:
                    await asyncio.shield(self._drop())

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._headers = {name: found[name] for name in KEPT_HEADERS if name in found}
        elif message["type"] == "http.response.body":
            data = message.get("body", b"")
            self._size += len(data)
            self._parts.append(data)
            if not self._keeps_text or self._size > MAX_KEPT:
                self._parts = self._parts[-2:]  # only to see how it ends

    async def _end(self) -> None:
        self._has_ended = True
        fingerprint, body = self._body.fingerprint, b"".join(self._parts)
        if fingerprint is None or self._status >= 500 or self._status in AGAIN or not self._is_whole(body):
            return await self._drop()
        is_short = self._keeps_text and self._size <= MAX_KEPT
        answer = Kept(self._status, self._headers, body if is_short else None)
        try:
            await self._state.replays.keep(self._claim, fingerprint, answer)
        except StateUnavailable as error:
            log.warning("an answer is not kept for its Idempotency-Key: %s", error)

    async def _drop(self) -> None:
        with suppress(StateUnavailable):  # then its lease runs out
            await self._state.replays.drop(self._claim)

    def _is_whole(self, body: bytes) -> bool:
        """A stream that ended with a fault is no answer."""
        if not self._headers.get("content-type", "").startswith("text/event-stream"):
            return True
        last = body.rstrip(b"\n").rpartition(b"\n\n")[2] + b"\n\n"
        return last == DONE or last.startswith(ENDS)

    async def _renew(self) -> None:
        await self._state.replays.renew(self._claim)


async def _replay(state: State, request: Request, body: _Body, found: Found) -> Response:
    """What the first one got; 409 for another body, while the first one runs, and when its answer is not kept."""
    if found.kept is None and (body.fingerprint is None or found.fingerprint in (None, body.fingerprint)):
        raise _refused("in_progress", "A request with this Idempotency-Key is in progress.", {"retry-after": "1"})
    if await body.read() != found.fingerprint:
        raise _refused("mismatch", "This Idempotency-Key was used for another request.")
    assert found.kept is not None
    if request.scope["path"] in METERED and not isinstance(request.scope[CALLER], AdminPrincipal):
        await renewal(request)()  # no hold() will tell whether the key is still good
    if found.kept.body is None:
        raise _refused("not_kept", "This request was answered before, and its answer is not kept.")
    return Response(found.kept.body, found.kept.status, found.kept.headers | {REPLAYED: "true"})


def _refused(what: str, message: str, headers: dict[str, str] | None = None) -> ApiError:
    headers = headers or {"x-should-retry": "false"}
    return ApiError(409, message, code=f"idempotency_{what}", param=HEADER, headers=headers)
