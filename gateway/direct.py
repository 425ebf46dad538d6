"""Direct: the few routes that carry nearly all requests, called without FastAPI's way to them (matching every route,
exit stacks, dependency solving): a fifth of the gateway's work for one request. They are declared as routes like all
others, for the OpenAPI document and for whoever walks the routes; a request that matches exactly takes this short cut.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import METERED, renewal, requires
from gateway.bodies import LENIENT, has_unknown
from gateway.items import ItemError
from tenants.keys import Principal

Endpoint = Callable[[Request, Principal], Awaitable[Response]]
INFERENCE = requires("inference")


class Direct:
    """ASGI, innermost before FastAPI: faults are answered further out, as those of all routes are."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        posts = [route for route in routes if isinstance(route, APIRoute) and route.methods == {"POST"}]
        self._routes = {route.path: route for route in posts if route.path in METERED}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            return await self._app(scope, receive, send)
        scope["route"] = route
        request = Request(scope, receive, send)
        endpoint = cast("Endpoint", route.endpoint)
        scope[LENIENT] = False
        try:
            response = await endpoint(request, await INFERENCE(request))
        except (ValidationError, ItemError) as error:
            if not has_unknown(error) or not (await renewal(request)()).ignores_unknown:
                raise
            scope[LENIENT] = True  # as the tenant is now, not as it was when its key was last looked up
            response = await endpoint(request, await INFERENCE(request))
        await response(scope, receive, send)
