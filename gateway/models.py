"""ModelTable: what a tenant may call, by name: the base model, its own adapters, shared ones. The last use of names.

ModelNotFound    nobody has it, others have it, or it is not on the caller's allow-lists: one and the same
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adapters.spec import AdapterRef
from tenants.limits import may_call

if TYPE_CHECKING:
    from adapters.registry import AdapterRegistry, Resolved
    from tenants.keys import Principal

CACHE_SIZE = 10_000
MAX_NAME = 256


class ModelNotFound(Exception):
    """The caller can't call a model of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Model:
    """What a name stands for now. `adapter` None = the base model; `owner` "" = shared or base. `target` is the model's
    own name, without a version, where `name` is how the tenant calls it."""

    name: str
    target: str
    adapter: AdapterRef | None = None
    version: int | None = None
    owner: str = ""
    created: int = 0


class ModelTable:
    """Names → models, cached as long as the tenant's epoch stands still: hold() notices when it moved.

    max_model_len   tokens of prompt and output, as model lists show it
    """

    def __init__(self, registry: AdapterRegistry, base: Model, max_model_len: int) -> None:
        self.base = base
        self.max_model_len = max_model_len
        self._registry = registry
        self._cache: OrderedDict[tuple[str, str], tuple[int, Model]] = OrderedDict()

    async def resolve(
        self, principal: Principal, name: str, renew: Callable[[], Awaitable[Principal]]
    ) -> tuple[Principal, Model]:
        """Raises ModelNotFound; before it says so it makes sure that the principal is up to date."""
        model = await self._find(principal, name)
        if model is not None:
            return principal, model
        return await self.renewed(name, renew)

    async def renewed(self, name: str, renew: Callable[[], Awaitable[Principal]]) -> tuple[Principal, Model]:
        """As resolve(), with a principal that is read anew first."""
        principal = await renew()
        model = await self._find(principal, name)
        if model is None:
            raise ModelNotFound(name)
        return principal, model

    async def visible(self, principal: Principal) -> list[Model]:
        """Everything that the caller may call: the base model first, then adapters by name."""
        adapters = await self._registry.visible(principal.tenant_id)
        models = [_model(row.name, row) for row in adapters]
        found = {model.name: model for model in (self.base, *models) if _is_allowed(principal, model.name)}
        for alias in principal.model_names:
            model = await self._find(principal, alias)
            if model is not None:
                found[alias] = model
        return list(found.values())

    async def _find(self, principal: Principal, name: str) -> Model | None:
        own_name = principal.model_names.get(name, name)
        if len(name) > MAX_NAME or not _is_allowed(principal, own_name):
            return None
        if own_name == self.base.name:
            return replace(self.base, name=name)
        key = (principal.tenant_id, name)
        epoch, model = self._cache.get(key, (None, None))
        if model is not None and epoch == principal.epoch:
            self._cache.move_to_end(key)
            return model
        row = await self._registry.resolve(principal.tenant_id, own_name)
        if row is None:
            self._cache.pop(key, None)
            return None
        model = _model(name, row)
        self._cache[key] = (principal.epoch, model)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return model


def _model(name: str, row: Resolved) -> Model:
    return Model(name, row.name, row.ref, row.version, row.tenant_id, row.created)


def _is_allowed(principal: Principal, name: str) -> bool:
    """A name with a version is allowed where the name is: versions are no way around an allow-list."""
    return may_call(name.partition("@")[0], principal.models, principal.key_models)
