"""Who asks: a bearer key → Principal or AdminPrincipal, for every path but a short public list. Knows no route.

Default-deny: `Authenticate` is pure ASGI around the whole application, so a route that nobody thought of, a wrong
method, the OpenAPI document and the 404 page all need a key. `requires(scope)` then declares, route by route, which
key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError, not_found, to_api_error, unauthorized
from tenants.addresses import is_within, networks
from tenants.admin_keys import ROLES, Administrator
from tenants.keys import InvalidKey, MayNotAct, Principal

if TYPE_CHECKING:
    from gateway.state import State

PUBLIC = frozenset({"/livez", "/readyz", "/health"})
METERED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
SAFE = frozenset({"GET", "HEAD"})
ACT_AS = "x-chorus-tenant"
"""A service key with scope `act_as` names here the tenant that it acts for."""
CALLER = "chorus.caller"
"""Where the ASGI scope carries who asks."""


@dataclass(frozen=True)
class AdminPrincipal:
    """The holder of an admin key; `actor` is what the audit log calls them."""

    administrator: Administrator

    @property
    def actor(self) -> str:
        return self.administrator.actor

    def has_role(self, role: str) -> bool:
        """This role, or one above it."""
        return ROLES[self.administrator.role] >= ROLES[role]


Caller = Principal | AdminPrincipal


def forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="insufficient_permissions")


class Authenticate:
    """ASGI: no public path → a valid key, or 401; when keys can't be looked up 503, never 401."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["path"] not in PUBLIC:
            try:
                check_port(scope)
                scope[CALLER] = await authenticate(scope["state"]["chorus"], Request(scope))
            except Exception as error:  # noqa: BLE001 - whatever went wrong, nobody gets through
                return await to_api_error(error).response()(scope, receive, send)
        await self._app(scope, receive, send)


def check_port(scope: Scope) -> None:
    """With an admin port, administration is there and nowhere else, and nothing else is there. Raises ApiError 404."""
    admin_port = scope["state"]["chorus"].settings.admin_port
    is_admin = scope["path"].startswith("/admin/") or scope["path"] == "/metrics"
    if admin_port is not None and is_admin != (scope.get("server", ("", None))[1] == admin_port):
        raise not_found("Unknown request URL.")


async def authenticate(state: State, request: Request) -> Caller:
    """Raises ApiError 401, or StateUnavailable when it can't be known."""
    key = bearer(request.headers.getlist("authorization"))
    administrator = await state.admin_keys.authenticate(key)
    if administrator is not None:
        return AdminPrincipal(administrator)
    return await _admitted(state, request, key, check_epoch=not is_metered(request))


async def _admitted(state: State, request: Request, key: str, check_epoch: bool) -> Principal:
    """The holder of a tenant's key, if it may be used here and so. Raises ApiError, StateUnavailable."""
    try:
        principal = await state.keys.authenticate(key, check_epoch=check_epoch, act_as=request.headers.get(ACT_AS))
    except InvalidKey:
        shown = f"{key[:12]}…{key[-4:]}" if len(key) > 24 and key.isascii() else "…"
        raise unauthorized(f"Incorrect API key provided: {shown}", "invalid_api_key") from None
    except MayNotAct:
        raise forbidden(f"This key lacks the scope `act_as`, which {ACT_AS} needs.") from None
    try:
        _check_use(state, request, principal)
    except ApiError:
        if check_epoch:
            raise
        return await _admitted(state, request, key, check_epoch=True)  # it may be allowed by now
    return principal


def _check_use(state: State, request: Request, principal: Principal) -> None:
    """Raises ApiError 401."""
    if principal.allowed_ips is not None and not is_within(client_address(request, state), principal.allowed_ips):
        raise unauthorized("This key may not be used from your address.", "ip_not_authorized")
    for what in ("organization", "project"):  # a tenant is both
        named = request.headers.get(f"openai-{what}")
        if named and named != principal.tenant_id:
            raise unauthorized(f"OpenAI-{what.title()} does not match the API key.", f"mismatched_{what}")


def client_address(request: Request, state: State) -> str:
    """The peer; behind trusted proxies the last address that they did not add themselves."""
    trusted = networks(state.settings.trusted_proxies)
    hops = [hop.strip() for value in request.headers.getlist("x-forwarded-for") for hop in value.split(",")]
    address = request.client.host if request.client else ""
    while trusted and hops and is_within(address, trusted):
        address = hops.pop()
    return address


def is_metered(request: Request) -> bool:
    """Will this request hold quota, which checks that nothing about the key has changed? Then that is its one round
    trip to Redis."""
    return request.method == "POST" and request.scope["path"] in METERED


def renewal(request: Request) -> Callable[[], Awaitable[Principal]]:
    """For Inference.stream: lets this request in once more, past every cache: its key may have changed in any way."""

    async def renew() -> Principal:
        state, key = state_of(request), bearer(request.headers.getlist("authorization"))
        principal = await _admitted(state, request, key, check_epoch=True)
        _check_scope(principal, "inference")
        return principal

    return renew


def bearer(values: list[str]) -> str:
    """The key of the one Authorization header. Raises ApiError 401."""
    if not values:
        raise unauthorized(
            "You didn't provide an API key. Send it in an Authorization header: `Authorization: Bearer YOUR_KEY`.",
            "missing_api_key",
        )
    scheme, _, key = values[0].partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not key.strip() or len(key) > 512:
        raise unauthorized("The Authorization header must be `Bearer YOUR_KEY`.", "invalid_api_key")
    return key.strip()


def _check_scope(principal: Principal, scope: str) -> None:
    if scope not in principal.scopes:
        raise forbidden(f"This key lacks the scope `{scope}`.")


class Requires:
    """A FastAPI dependency: the caller, if its key may do this; `scope` shows what a route asks for."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        caller = caller_of(request)
        if self.scope == "any":
            return caller
        if self.scope.startswith("admin"):
            if not isinstance(caller, AdminPrincipal):
                raise forbidden("This needs an admin key.")
            role = "admin" if self.scope == "admin:keys" else "viewer" if request.method in SAFE else "operator"
            if not caller.has_role(role):
                raise forbidden(f"This needs an admin key with the role {role}.")
            return caller
        if not isinstance(caller, Principal):
            raise forbidden("The admin key is for administration; use a tenant's key here.")
        if self.scope == "inference" and self.scope not in caller.scopes and is_metered(request):
            return await renewal(request)()  # what is known of the key may be out of date
        if self.scope != "tenant":
            _check_scope(caller, self.scope)
        return caller


class _RequiresAdmin(Requires):
    async def __call__(self, request: Request) -> AdminPrincipal:
        caller = await super().__call__(request)
        assert isinstance(caller, AdminPrincipal)
        return caller


class _RequiresTenant(Requires):
    async def __call__(self, request: Request) -> Principal:
        caller = await super().__call__(request)
        assert isinstance(caller, Principal)
        return caller


@overload
def requires(scope: Literal["admin", "admin:keys"]) -> _RequiresAdmin: ...
@overload
def requires(scope: Literal["inference", "adapters:write", "tenant"]) -> _RequiresTenant: ...
@overload
def requires(scope: Literal["any"]) -> Requires: ...
def requires(scope: str) -> Requires:
    """For `Depends(...)`: "inference", "adapters:write" → Principal with that scope; "tenant" → any tenant key;
    "admin" → AdminPrincipal, who may read as viewer and change things as operator; "admin:keys" → role admin;
    "any" → whoever has a key."""
    if scope.startswith("admin"):
        return _RequiresAdmin(scope)
    return Requires(scope) if scope == "any" else _RequiresTenant(scope)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def state_of(request: Request) -> State:
    """What the lifespan built."""
    state: State = request.scope["state"]["chorus"]
    return state
