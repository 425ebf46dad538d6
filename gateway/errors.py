"""One table from every package's errors to (status, OpenAI type, code, headers), for answers and for SSE events alike.

ApiError     an answer in OpenAI's error shape; what a route raises by itself
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from adapters.quota import AdapterQuotaExceeded
from adapters.records import (
    AdapterNotFound,
    BaseMismatch,
    NameTaken,
    NoEarlierVersion,
    RegistryError,
    VersionConflict,
    VersionInUse,
)
from adapters.spec import AdapterError, AdapterMissing, AdapterTooLarge
from adapters.storage import StorageError
from engine.params import ParamsError
from engine.protocol import EngineError, Unavailable
from engine.text import PromptError, TextError
from gateway.conversations import ConversationBusy, NotKept, NotStored, TurnLost
from gateway.items import ItemError
from gateway.models import AdapterMismatch, ModelNotFound
from gateway.upload import UploadError, UploadTooLarge, UploadTooSlow
from tenants.admin_keys import AdminKeyNotFound, LastAdminKey
from tenants.db import StateUnavailable
from tenants.directory import TenantExists, TenantNotFound
from tenants.keys import InvalidKey, KeyExists, KeyNotFound, MayNotGrant, TenantSuspended
from tenants.limits import InvalidSettings
from tenants.plans import PlanExists, PlanInUse, PlanNotFound
from tenants.quotas import QuotaExceeded, Stale, Window

log = logging.getLogger("chorus.gateway")
MAX_SDK_WAIT_S = 60.0
UNKNOWN_PART = "unknown_part"
"""What pydantic calls a part of a message whose type is not served."""
MAX_MESSAGE = 1000
"""Characters of a message: whatever a client sent and we quote, an error body stays small."""


@dataclass(eq=False)
class ApiError(Exception):
    """What the client gets: {"error": {message, type, param, code}} with this status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 1] + "…"
        error = {"message": _sendable(message), "type": self.type, "param": _sendable(self.param), "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers), media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def not_found(what: str, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, what, code=code, param=param)


def conflict(message: str, param: str | None = None, code: str = "conflict") -> ApiError:
    """Not to be tried again as it is, which clients would do with any other 409."""
    return ApiError(409, message, code=code, param=param, headers={"x-should-retry": "false"})


def unavailable(message: str, code: str = "service_unavailable", retry_after_s: float | None = None) -> ApiError:
    return ApiError(503, message, "server_error", code, headers=retry_headers(retry_after_s or 1.0))


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def retry_headers(seconds: float) -> dict[str, str]:
    """Retry-After is an integer of at least 1; retry-after-ms, which the SDK reads first, is exact. A long wait is not
    left to SDKs: they would give up at once, or (1.x) take it for none and come again in a moment."""
    wait = {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}
    return wait | {"x-should-retry": "false"} if seconds > MAX_SDK_WAIT_S else wait


def to_api_error(error: BaseException) -> ApiError:
    """The answer for any error; what nobody knows is a 500 that tells nothing, and a line in the log."""
    for kind, convert in _TABLE:
        if isinstance(error, kind):
            return convert(error)
    log.error("unexpected %s", traced(error))
    return ApiError(500, "The server had an error while processing your request.", "server_error")


def traced(error: BaseException) -> str:
    """What it was and where, as the log may know it: without its message, which may quote a prompt or an answer."""
    lines: list[str] = []
    found: BaseException | None = error
    while found is not None:
        frames = traceback.extract_tb(found.__traceback__)
        lines.append(type(found).__name__)
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        found = found.__cause__ or found.__context__
    return "\n".join(lines)


_ENGINE: dict[str, tuple[int, str, str | None]] = {
    "prompt_too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "invalid_request": (400, "invalid_request_error", "invalid_value"),
    "adapter_not_found": (503, "server_error", "model_loading"),  # the registry knows it: its files come, or are back
    "adapter_invalid": (500, "server_error", "adapter_invalid"),
    "adapter_loading": (503, "server_error", "model_loading"),
    "queue_full": (503, "server_error", "server_is_overloaded"),
    "lane_full": (429, "requests", "rate_limit_exceeded"),
    "deadline": (504, "server_error", "timeout"),
    "draining": (503, "server_error", "service_unavailable"),
    "unavailable": (503, "server_error", "service_unavailable"),
}
_UNKNOWN = (500, "server_error", None)


def _from_engine(error: EngineError) -> ApiError:
    status, kind, code = _ENGINE.get("unavailable" if isinstance(error, Unavailable) else error.code, _UNKNOWN)
    retryable = status in (429, 503)
    headers = retry_headers(error.retry_after_s or 1.0) if retryable else {}
    return ApiError(status, error.message, kind, code, error.param, headers)


def limited(error: EngineError, windows: Mapping[str, Window]) -> ApiError:
    """An engine's limit, told as the tenant's own are."""
    answer = _from_engine(error)
    return replace(answer, headers={**rate_headers(windows), **answer.headers})


def _from_model(error: ModelNotFound) -> ApiError:
    """One text for names that nobody has and names that others have."""
    shown = error.name if len(error.name) <= 100 else error.name[:99] + "…"
    message = f"The model `{shown}` does not exist or you do not have access to it."
    return ApiError(404, message, code="model_not_found", param="model")


def _from_mismatch(error: AdapterMismatch) -> ApiError:
    message = f"The adapter `{error.name}` was made for another base model than is served now. Upload it again."
    return conflict(message, "model", "base_mismatch")


def _from_quota(error: QuotaExceeded) -> ApiError:
    """429 that says which limit, and when it is worth while to come again, if ever."""
    unit = {"minute": f"{error.dimension} per min", "": "concurrent requests"}.get(error.period, "")
    numbers = f"Limit {error.limit}, Used {error.used}, Requested {error.requested}."
    headers = rate_headers(error.windows)
    if error.reset_s is not None:
        message = (
            f"You exceeded your current quota: the budget of this {error.scope} for tokens per {error.period} does not "
            f"have what this request needs: {numbers} A new {error.period} begins in {go_duration(error.reset_s)}."
        )
        headers["x-should-retry"] = "false"
        return ApiError(429, message, "insufficient_quota", "insufficient_quota", headers=headers)
    message = f"Rate limit reached for this {error.scope} on {unit}: {numbers}"
    if error.retry_after_s is None:
        headers["x-should-retry"] = "false"
        message += " Waiting does not help: a single request is above the limit."
    else:
        headers |= retry_headers(error.retry_after_s)
        message += f" Please try again in {go_duration(error.retry_after_s)}."
    kind = "tokens" if error.dimension == "tokens" else "requests"
    return ApiError(429, message, kind, "rate_limit_exceeded", headers=headers)


def rate_headers(windows: Mapping[str, Window]) -> dict[str, str]:
    """The six x-ratelimit-* headers, without those of what is unlimited."""
    headers = {}
    for name, window in windows.items():
        headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, window.remaining))
        headers[f"x-ratelimit-reset-{name}"] = go_duration(window.reset_s)
    return headers


def go_duration(seconds: float) -> str:
    """12ms, 1.5s, 6m0s, 1h0m0s: as Go prints a duration."""
    total_ms = max(0, math.ceil(seconds * 1000))
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:g}s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + text


def _from_adapter(error: AdapterError) -> ApiError:
    if isinstance(error, AdapterMissing):
        return ApiError(404, error.message, code=error.code, param=error.param)
    is_large = isinstance(error, AdapterTooLarge) and error.code != "rank_too_large"
    return ApiError(413 if is_large else 422, error.message, code=error.code, param=error.param)


def _from_bucket(error: StorageError) -> ApiError:
    log.warning("the storage of adapters failed: %s", error)
    return unavailable("The storage of adapters is temporarily unavailable, please try again.", "storage_unavailable")


def _from_registry(error: RegistryError) -> ApiError:
    if isinstance(error, NameTaken | VersionConflict):
        return conflict(error.message, error.param)
    if isinstance(error, BaseMismatch | NoEarlierVersion | VersionInUse):
        return conflict(error.message, error.param, error.code)
    return ApiError(
        404 if isinstance(error, AdapterNotFound) else 400, error.message, code=error.code, param=error.param
    )


def _from_adapter_quota(error: AdapterQuotaExceeded) -> ApiError:
    message = (
        f"Your quota of {'bytes of adapters' if error.dimension == 'bytes' else 'adapters'} is used up: "
        f"Limit {error.limit}, Used {error.used}, Requested {error.requested}. Delete versions or adapters first."
    )
    return ApiError(403, message, "insufficient_quota", "adapter_quota_exceeded")


def _from_upload(error: UploadError) -> ApiError:
    status = 413 if isinstance(error, UploadTooLarge) else 408 if isinstance(error, UploadTooSlow) else 400
    return ApiError(status, error.message, code=error.code, param=error.param)


def _from_storage(error: NotStored) -> ApiError:
    is_previous = error.code in ("previous_response_not_found", "response_chain_broken")
    return not_found(error.message, "previous_response_id" if is_previous else None, error.code)


def _from_busy(error: ConversationBusy) -> ApiError:
    return ApiError(409, error.message, code=error.code, headers=retry_headers(1.0))


def _from_state(error: StateUnavailable) -> ApiError:
    return unavailable("The service is temporarily unavailable, please try again.", retry_after_s=error.retry_after_s)


def _from_http(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
    message = {404: "Unknown request URL.", 405: "This method is not allowed here."}.get(error.status_code)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return ApiError(error.status_code, message or str(error.detail), kind, code, headers=error.headers or {})


def _from_validation(error: ValidationError) -> ApiError:
    return from_details(error.errors(include_url=False, include_context=False))


def from_details(details: list[ErrorDetails]) -> ApiError:
    """The first thing that pydantic found, as OpenAI would say it. Unknown fields are named before wrong values."""
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    if not first["loc"]:
        return bad_request("The request body must be a JSON object.", code=None)
    param = json_path(first["loc"]) or str(first["loc"][-1])[:64]
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {param}", param, "unsupported_parameter")
    if first["type"] == UNKNOWN_PART:
        return bad_request(f"Invalid value for '{param}.type': {first['msg']}", f"{param}.type")
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return bad_request(f"Invalid value for '{param}': {first['msg']}", param)


def json_path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") → messages[0].content; names of union members, which are not in the JSON, are left
    out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path


_UNION_MEMBERS = frozenset(
    {"str", "int", "float", "bool", "list", "dict", "constrained", "TextPart", "RefusalPart", "ConversationRef"}
)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _sendable(text: str | None) -> str | None:
    """JSON is UTF-8, which has no lone surrogates."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")


_TABLE: list[tuple[type[BaseException], Callable[[Any], ApiError]]] = [
    (ApiError, lambda error: error),
    (ParamsError, lambda error: bad_request(f"Invalid value for '{error.param}': {error.message}", error.param)),
    (PromptError, lambda error: bad_request(error.message, error.param)),
    (TextError, lambda error: ApiError(500, error.message, "server_error")),
    (EngineError, _from_engine),
    (ModelNotFound, _from_model),
    (AdapterMismatch, _from_mismatch),
    (QuotaExceeded, _from_quota),
    (Stale, lambda _: unavailable("The tenant is being changed, please try again.")),
    (InvalidKey, lambda _: unauthorized("Incorrect API key provided.", "invalid_api_key")),
    (TenantSuspended, lambda _: unauthorized("This account is suspended.", "account_deactivated")),
    (TenantNotFound, lambda error: not_found(str(error), code="tenant_not_found")),
    (KeyNotFound, lambda error: not_found(str(error), code="key_not_found")),
    (AdminKeyNotFound, lambda error: not_found(str(error), code="key_not_found")),
    (MayNotGrant, lambda error: ApiError(403, _sentence(str(error)), code="insufficient_permissions")),
    (KeyExists, lambda error: conflict(str(error), "sha256")),
    (LastAdminKey, lambda error: conflict(str(error))),
    (PlanNotFound, lambda error: not_found(str(error), code="plan_not_found")),
    (TenantExists, lambda error: conflict(str(error), "id")),
    (PlanExists, lambda error: conflict(str(error), "id")),
    (PlanInUse, lambda error: conflict(str(error))),
    (InvalidSettings, lambda error: bad_request(str(error), error.param)),
    (AdapterError, _from_adapter),
    (StorageError, _from_bucket),
    (RegistryError, _from_registry),
    (AdapterQuotaExceeded, _from_adapter_quota),
    (UploadError, _from_upload),
    (ItemError, lambda error: bad_request(f"Invalid '{error.param}': {error.message}.", error.param, error.code)),
    (NotStored, _from_storage),
    (ConversationBusy, _from_busy),
    (NotKept, lambda error: bad_request(error.message, None, error.code)),
    (TurnLost, lambda error: ApiError(409, error.message, code=error.code, headers={"x-should-retry": "false"})),
    (StateUnavailable, _from_state),
    (ValidationError, _from_validation),
    (HTTPException, _from_http),
    (ClientDisconnect, lambda _: ApiError(499, "The client went away.", code="client_closed")),
]
