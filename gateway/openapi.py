"""Gateway: the FastAPI application whose OpenAPI document tells the truth: every error in OpenAI's shape, with the
statuses that can come, where a key is needed, and what is no JSON."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from gateway.auth import METERED, PUBLIC

ERROR = {
    "type": "object", "required": ["error"], "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"], "additionalProperties": False,
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip
MEANINGS = {
    400: "a parameter is wrong; `param` names it", 401: "no key, or none that is known", 403: "the key may not do this",
    404: "there is no such thing, or it is not yours", 408: "headers or body did not arrive in time",
    409: "taken, busy, or changed meanwhile", 413: "the body is too large", 422: "the adapter can't be served",
    429: "a limit; the message names it", 500: "our fault", 503: "a store or an engine is away, or full",
    504: "the request's time is over",
}  # fmt: skip
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


class Gateway(FastAPI):
    """Its document is ours, and our layers are the outermost: they answer faults and bound bodies themselves, so those
    that FastAPI puts around them would only cost."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        handlers = cast("dict[Any, ExceptionHandler]", self.exception_handlers)
        app: ASGIApp = ExceptionMiddleware(AsyncExitStackMiddleware(self.router), handlers=handlers)
        for layer, args, options in reversed(self.user_middleware):
            app = layer(app, *args, **options)
        return app

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = described(super().openapi())
        return self.openapi_schema


def described(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document, with our errors instead of its own, and the key."""
    components = document.setdefault("components", {})
    components["schemas"] = {
        name: schema
        for name, schema in components.get("schemas", {}).items()
        if name not in ("HTTPValidationError", "ValidationError")
    } | {"Error": ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe(path, method, operation)
    return document


def _describe(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path == "/admin/v1/usage/export":
        responses["200"]["content"] = {
            kind: {"schema": {"type": "string"}} for kind in ("text/csv", "application/jsonl")
        }
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path in PUBLIC:
        _describe_public(path, responses)
        return
    operation["security"] = [{"key": []}]
    if path in METERED:
        responses["200"]["content"] |= EVENTS
    for status in statuses(path, method):
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[str(status)] = {"description": MEANINGS[status], "content": content}


def _describe_public(path: str, responses: dict[str, Any]) -> None:
    if path == "/health":
        responses["200"] = {"description": "the engine answers"}
    if path != "/livez":
        responses["503"] = {"description": "not ready"}


def statuses(path: str, method: str) -> list[int]:
    """Of the errors that this operation can answer with."""
    found = {400, 401, 403, 404, 500, 503}
    if method != "get" or path == "/v1/models/{model}":
        found |= {409}
    if method != "get":
        found |= {408, 413}
    if path in METERED:
        found |= {429, 504}
    if "adapters" in path and method != "get":
        found |= {422}
    return sorted(found)
