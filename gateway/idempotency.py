"""Idempotency-Key on the POSTs of administration: the same request again gets the first answer again, for a day.

In Redis, by caller, path and key; the answer is kept encrypted, because it may show a new key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import CALLER, AdminPrincipal
from gateway.bodies import PARSED
from gateway.errors import ApiError, bad_request

if TYPE_CHECKING:
    from gateway.state import State

HEADER = "idempotency-key"
KEEP_S = 86400
PENDING_S = 120
"""After this time a request whose worker died may be tried again."""
MAX_KEY = 255


class Idempotent:
    """ASGI: passes on what is no POST to /admin/v1/ with the header; else runs it once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        given = request.headers.get(HEADER) if request is not None else None
        if request is None or given is None or not scope["path"].startswith("/admin/v1/"):
            return await self._app(scope, receive, send)
        state: State = scope["state"]["chorus"]
        caller = scope[CALLER]
        if not isinstance(caller, AdminPrincipal):
            return await self._app(scope, receive, send)  # which refuses it
        if not 0 < len(given) <= MAX_KEY or PARSED not in scope:
            what = "can't be used for uploads" if PARSED not in scope else f"has 1 to {MAX_KEY} characters"
            return await bad_request(f"Idempotency-Key {what}.", HEADER).response()(scope, receive, send)
        name = hashlib.sha256(orjson.dumps([caller.administrator.key_id, scope["path"], given])).hexdigest()
        asked = [scope["query_string"].decode("latin-1"), scope[PARSED]]
        body = hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()
        record = f"chorus:idempotency:{name}"
        if not await state.redis.set(record, orjson.dumps({"body": body}), nx=True, ex=PENDING_S):
            kept = await state.redis.get(record)
            answer = _replay(state.settings.pepper, record, orjson.loads(kept or b"{}"), body)
            return await answer(scope, receive, send)
        await self._run(state, record, body, scope, receive, send)

    async def _run(self, state: State, record: str, body: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Faults of ours are not kept: they may be tried again with the same key."""
        status, parts = 500, []

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body") and status < 500:
                    nonce = secrets.token_hex(16)
                    sealed = _crypt(state.settings.pepper, record + nonce, b"".join(parts))
                    kept = {"body": body, "status": status, "nonce": nonce, "answer": sealed.hex()}
                    await state.redis.set(record, orjson.dumps(kept), ex=KEEP_S)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if status >= 500:
                await state.redis.delete(record)


def _replay(pepper: str, record: str, kept: dict[str, Any], body: str) -> Response:
    """What the first one got; 409 for another body, and while the first one runs."""
    headers = {"x-should-retry": "false"}
    if kept.get("body") not in (None, body):
        text = "This Idempotency-Key was used for another request."
        return ApiError(409, text, code="idempotency_mismatch", param=HEADER, headers=headers).response()
    if "status" not in kept:
        text = "A request with this Idempotency-Key is in progress."
        headers = {"retry-after": "1"}
        return ApiError(409, text, code="idempotency_in_progress", param=HEADER, headers=headers).response()
    answer = _crypt(pepper, record + kept["nonce"], bytes.fromhex(kept["answer"]))
    return Response(answer, kept["status"], {"idempotency-replayed": "true"}, media_type="application/json")


def _crypt(pepper: str, name: str, data: bytes) -> bytes:
    """XOR with a stream that only this name (with its nonce) has, under a key that only we have."""
    key = hmac.new(pepper.encode(), b"idempotency:" + name.encode(), hashlib.sha256).digest()
    stream = hashlib.shake_256(key).digest(len(data))
    return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")
